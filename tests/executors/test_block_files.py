"""KV blocks in files: only what was written whole, by the same model, is read again."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

import pytest

from evenflow.core.blocks import Content
from evenflow.errors import InvalidConfig
from evenflow.executors.block_files import BlockFiles

GB = 1 << 30
ONE, TWO = Content(b"1" * 16, "acme"), Content(b"2" * 16, "")


def written(folder: Path, model: str = "model") -> BlockFiles:
    files = BlockFiles(folder, model, GB)
    files.write(ONE, b"first\n" * 50)
    files.write(TWO, b"second" * 50)
    return files


def path_of(folder: Path, content: Content) -> Path:
    (path,) = folder.glob(f"*{content.block_hash.hex()}*")
    return path


def test_what_was_written_is_found_by_the_next_process_in_order_of_use(tmp_path: Path) -> None:
    files = written(tmp_path / "new" / "folder")
    for age, content in ((100, TWO), (200, ONE)):
        os.utime(path_of(tmp_path / "new" / "folder", content), (time.time() - age,) * 2)
    again = BlockFiles(tmp_path / "new" / "folder", "model", GB)
    assert again.contents == (ONE, TWO)
    assert again.read(ONE.block_hash) == b"first\n" * 50 == files.read(ONE.block_hash)
    third = BlockFiles(tmp_path / "new" / "folder", "model", GB)
    assert third.contents == (TWO, ONE)  # reading is use


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    written(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert path_of(tmp_path / "cache", ONE).stat().st_mode & 0o777 == 0o600


def test_a_file_cut_off_anywhere_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written(tmp_path)
    path = path_of(tmp_path, ONE)
    whole = path.read_bytes()
    for length in (0, 1, 50, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "evenflow"):
            files = BlockFiles(tmp_path, "model", GB)
        assert files.contents == (TWO,), length
        assert [record.getMessage() for record in caplog.records] == [
            f"Ignored files in {tmp_path}: 1 torn. They go when room is needed."
        ]


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    files = written(tmp_path)
    path = path_of(tmp_path, ONE)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        broken = bytearray(whole)
        broken[place] ^= 1
        path.write_bytes(broken)
        assert files.read(ONE.block_hash) is None, place
    path.write_bytes(whole)
    assert files.read(ONE.block_hash) is not None


@pytest.mark.parametrize(("field", "value"), [("model", "other"), ("version", 2), ("format", "else")])
def test_a_foreign_file_is_ignored_even_under_our_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, field: str, value: object
) -> None:
    written(tmp_path)
    path = path_of(tmp_path, ONE)
    line, _, data = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | {field: value}).encode() + b"\n" + data)
    with caplog.at_level(logging.WARNING, "evenflow"):
        files = BlockFiles(tmp_path, "model", GB)
    assert files.contents == (TWO,)
    assert "1 of another model, format or version" in caplog.text
    assert files.read(ONE.block_hash) is None


@pytest.mark.parametrize("line", [b"", b"[]\n", b"{}\n", b"\xff" * 2000, b"[" * 1000, b'{"format": "evenflow-kv"}\n'])
def test_any_other_file_is_ignored(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "x.kv").write_bytes(line)
    (tmp_path / "notes.txt").write_text("not a block")
    (tmp_path / "folder.kv").mkdir()
    assert BlockFiles(tmp_path, "model", GB).contents == ()
    assert (tmp_path / "notes.txt").exists()


def test_models_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    written(tmp_path, "old")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    files = BlockFiles(tmp_path, "new", size + 10)
    assert files.contents == ()
    files.write(ONE, b"x" * 300)
    assert files.read(ONE.block_hash) == b"x" * 300
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size + 10
    assert len(list(tmp_path.glob("old-*"))) == 1, "no more than is needed goes"


def test_what_a_dead_process_left_half_written_goes(tmp_path: Path) -> None:
    old, new = tmp_path / "a.1.tmp", tmp_path / "b.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    BlockFiles(tmp_path, "model", GB)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"cache_dir='.*/file' but it cannot be used \(.*\): give a folder"):
        BlockFiles(tmp_path / "file", "model", GB)


def test_a_removed_block_is_gone(tmp_path: Path) -> None:
    files = written(tmp_path)
    files.remove(ONE.block_hash)
    assert files.read(ONE.block_hash) is None
    assert BlockFiles(tmp_path, "model", GB).contents == (TWO,)
