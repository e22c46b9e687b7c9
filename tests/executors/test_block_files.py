"""KV blocks in files: only what was written whole, by the same model, is read again."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from pathlib import Path

import pytest

from evenflow.core.blocks import Content
from evenflow.errors import InvalidConfig
from evenflow.executors import block_files
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
    (tmp_path / f"x-{'0' * 32}.kv").write_bytes(line)
    (tmp_path / f"folder-{'0' * 32}.kv").mkdir()
    assert BlockFiles(tmp_path, "model", GB).contents == ()


def test_files_of_other_programs_are_left_alone(tmp_path: Path) -> None:
    names = {"notes.txt", "mine.kv", "half.tmp", "half.1.tmp"}
    for name in names:
        (tmp_path / name).write_bytes(b"not a block")
        os.utime(tmp_path / name, (1, 1))
    BlockFiles(tmp_path, "model", 0)
    assert set(os.listdir(tmp_path)) == names


def test_models_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    written(tmp_path, "old")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    files = BlockFiles(tmp_path, "new", size + 10)
    assert files.contents == ()
    files.write(ONE, b"x" * 300)
    assert files.read(ONE.block_hash) == b"x" * 300
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= size + 10
    assert len(list(tmp_path.glob("old-*"))) == 1, "no more than is needed goes"


def test_what_a_dead_process_left_half_written_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old, new = (tmp_path / f"model-{number * 32}.{number}.tmp" for number in "12")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 3600,) * 2)
    BlockFiles(tmp_path, "model", GB)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"
    BlockFiles(tmp_path, "model", 3)
    assert not new.exists(), "it counts too"
    assert not caplog.records


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_was_used_least_recently_makes_room(tmp_path: Path) -> None:
    files = written(tmp_path)
    files = BlockFiles(tmp_path, "model", num_bytes(tmp_path) + 10)
    assert files.read(ONE.block_hash) is not None
    files.write(Content(b"3" * 16, ""), b"third" * 50)
    assert files.read(TWO.block_hash) is None
    assert files.read(ONE.block_hash) is not None
    for number in range(40):
        files.write(Content(bytes([number]) * 16, ""), b"x" * (10 * number))
        assert num_bytes(tmp_path) <= files.max_bytes
    files.write(ONE, b"x" * files.max_bytes)
    assert files.read(ONE.block_hash) is None, "it fits nowhere"


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    written(tmp_path)
    os.utime(path_of(tmp_path, TWO), (1, 1))
    files = BlockFiles(tmp_path, "model", num_bytes(tmp_path) - 1)
    assert files.contents == (ONE,)
    assert num_bytes(tmp_path) <= files.max_bytes


def test_a_write_that_breaks_off_leaves_nothing_uncounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = BlockFiles(tmp_path, "model", 5_000)

    def fails(*_: object, **__: object) -> None:
        raise OSError(5, "the disk fails")

    for number in range(20):
        with monkeypatch.context() as broken:
            broken.setattr(Path, "replace", fails)
            if number % 2:
                broken.setattr(Path, "unlink", fails)
            with pytest.raises(OSError, match="the disk fails"):
                files.write(Content(bytes([number]) * 16, ""), b"x" * 700)
    files.write(ONE, b"x" * 700)
    assert num_bytes(tmp_path) <= files.max_bytes


def test_on_a_full_disk_the_oldest_blocks_give_way_and_a_restart_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = block_files._store

    def store_on_a_small_disk(path: Path, *parts: bytes) -> None:
        used = sum(one.stat().st_size for one in tmp_path.iterdir())
        if used + sum(map(len, parts)) > 10_000:
            store(path, parts[0])  # torn
            raise OSError(errno.ENOSPC, "No space left on device")
        store(path, *parts)

    monkeypatch.setattr(block_files, "_store", store_on_a_small_disk)
    files = BlockFiles(tmp_path, "model", GB)
    contents = [Content(bytes([number]) * 16, "") for number in range(20)]
    for content in contents:
        files.write(content, bytes(2000))
    again = BlockFiles(tmp_path, "model", GB)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert 2 <= len(sizes) <= 4
    assert again._num_bytes == files._num_bytes == sum(sizes) <= 10_000
    assert again.contents[-1] == contents[-1]
    assert set(again.contents) == set(contents[-len(sizes) :])
    for path in tmp_path.iterdir():
        path.unlink()
    (tmp_path / "of another program").write_bytes(bytes(10_000))
    empty = BlockFiles(tmp_path, "model", GB)
    with pytest.raises(OSError, match="No space"):
        empty.write(contents[0], bytes(2000))
    assert empty._num_bytes == 0
    assert len(list(tmp_path.iterdir())) == 1


def test_processes_that_share_a_folder_share_its_bound(tmp_path: Path) -> None:
    size = 100_000
    both = [BlockFiles(tmp_path, "model", size) for _ in range(2)]
    for number in range(400):
        both[number % 2].write(Content(number.to_bytes(16, "big"), ""), b"x" * 700)
        assert num_bytes(tmp_path) <= size * 9 / 8, "each lists the folder after a sixteenth of its size"
    assert num_bytes(tmp_path) > size / 2


def test_two_writers_of_a_block_never_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes in two containers may have the same number, and so have two engines of one process."""
    one, other = (BlockFiles(tmp_path, "model", GB) for _ in range(2))
    replace = Path.replace

    def after_the_other(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        other.write(ONE, b"same" * 50)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", after_the_other)
    one.write(ONE, b"same" * 50)
    assert one.read(ONE.block_hash) == other.read(ONE.block_hash) == b"same" * 50
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("tenant", ["\N{GRINNING FACE}" * 128, "\0" * 128, "\ud800" * 128, '"' * 128])
def test_a_tenant_of_any_characters_finds_its_blocks(tmp_path: Path, tenant: str) -> None:
    content = Content(b"1" * 16, tenant)
    BlockFiles(tmp_path, "0" * 32, GB).write(content, b"first")
    again = BlockFiles(tmp_path, "0" * 32, GB)
    assert again.contents == (content,)
    assert again.read(content.block_hash) == b"first"


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"cache_dir='.*/file' but it cannot be used \(.*\): give a folder"):
        BlockFiles(tmp_path / "file", "model", GB)


def test_a_folder_that_all_users_may_write_to_is_refused(tmp_path: Path) -> None:
    """What somebody else put there would be taken for the KV of a prompt."""
    for mode in (0o777, 0o702, 0o1777):
        tmp_path.chmod(mode)
        with pytest.raises(InvalidConfig, match=rf"all users may write to it: its mode is {mode:o}.*chmod o-w"):
            BlockFiles(tmp_path, "model", GB)
        assert tmp_path.stat().st_mode & 0o7777 == mode
    tmp_path.chmod(0o755)
    BlockFiles(tmp_path, "model", GB)


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "new")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_a_removed_block_is_gone(tmp_path: Path) -> None:
    files = written(tmp_path)
    files.remove(ONE.block_hash)
    assert files.read(ONE.block_hash) is None
    assert BlockFiles(tmp_path, "model", GB).contents == (TWO,)
