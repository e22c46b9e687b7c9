"""Whatever becomes of a file, a block is read as it was written or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.blocks import Content
from evenflow.executors.block_files import BlockFiles
from evenflow.model.kv_codec import CODECS, BlockLayout

GB = 1 << 30
ONE, TWO = Content(b"1" * 16, "acme"), Content(b"2" * 16, "")
LAYOUT = BlockLayout((2, 3, 4), torch.float32)

Damage = tuple[str, int, bytes]  # what happens to a file, where, and with what
DAMAGES = st.lists(
    st.tuples(
        st.sampled_from(["cut", "flip", "overwrite", "insert", "prepend", "append"]),
        st.integers(0, 1 << 12),
        st.binary(min_size=1, max_size=40),
    ),
    min_size=1,
    max_size=4,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("format", "version", "model", "hash", "tenant", "bytes", "checksum", "extra")


def damaged(data: bytes, damages: list[Damage]) -> bytes:
    for kind, place, new in damages:
        place %= len(data) + 1
        before, after = data[:place], data[place:]
        if kind == "cut":
            data = before
        elif kind == "flip":
            data = before + bytes([after[0] ^ (1 << place % 8)]) + after[1:] if after else data
        elif kind == "overwrite":
            data = before + new + after[len(new) :]
        elif kind == "insert":
            data = before + new + after
        else:
            data = new + data if kind == "prepend" else data + new
    return data


def check(content: bytes, first: bytes, second: bytes) -> None:
    """Two blocks were written, and the file of the first now has this content."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = BlockFiles(folder, "model", GB)
        files.write(ONE, first)
        files.write(TWO, second)
        (path,) = folder.glob(f"*{ONE.block_hash.hex()}*")
        is_whole = content == path.read_bytes()
        path.write_bytes(content)
        again = BlockFiles(folder, "model", GB)
        assert {one.block_hash for one in again.contents} <= {ONE.block_hash, TWO.block_hash}
        for reader in (files, again):
            assert reader.read(ONE.block_hash) == (first if is_whole else None)
            assert reader.read(TWO.block_hash) == second
        again.write(ONE, b"anew")
        assert BlockFiles(folder, "model", GB).read(ONE.block_hash) == b"anew"


def file_of(content: Content, data: bytes, model: str = "model") -> bytes:
    with TemporaryDirectory() as name:
        BlockFiles(Path(name), model, GB).write(content, data)
        (path,) = Path(name).iterdir()
        return path.read_bytes()


@given(data=st.binary(max_size=200), damages=DAMAGES)
def test_a_damaged_file_is_ignored(data: bytes, damages: list[Damage]) -> None:
    check(damaged(file_of(ONE, data), damages), data, b"second")


@pytest.mark.slow
@given(content=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode() + b"\n"))
def test_foreign_content_is_ignored(content: bytes) -> None:
    check(content, b"first", b"second")


@given(field=st.sampled_from(FIELDS), value=JSON)
def test_a_header_with_any_other_field_is_ignored(field: str, value: object) -> None:
    line, _, data = file_of(ONE, b"first").partition(b"\n")
    header = json.loads(line)
    changed = header | {field: value}
    check(json.dumps(changed).encode() + b"\n" + data, b"first", b"second")


@pytest.mark.parametrize("depth", [10, 400, 930, 100_000])
def test_a_header_of_any_depth_is_ignored(depth: int) -> None:
    header = file_of(ONE, b"first").partition(b"\n")[0].decode()
    nested = header.rstrip("}") + ', "extra": ' + "[" * depth + "]" * depth + "}\n"
    check(nested.encode() + b"first", b"first", b"second")


@pytest.mark.parametrize("other", [file_of(TWO, b"first"), file_of(ONE, b"first", "other")])
def test_a_whole_file_of_another_block_or_model_is_ignored(other: bytes) -> None:
    check(other, b"first", b"second")


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    folder, pipe = (tmp_path / f"{name}-{'0' * 32}.kv" for name in ("folder", "pipe"))
    folder.mkdir()
    os.mkfifo(pipe)  # opening it would wait for ever
    files = BlockFiles(tmp_path, "model", 300)  # one fits
    for content in (ONE, TWO):
        files.write(content, b"first")
        assert files.read(content.block_hash) == b"first"
    assert folder.is_dir()
    assert pipe.is_fifo()


@pytest.mark.parametrize("name", list(CODECS))
@given(content=st.binary(max_size=200), damages=DAMAGES, keeps=st.booleans())
def test_a_codec_refuses_or_gives_a_block(name: str, content: bytes, damages: list[Damage], keeps: bool) -> None:
    encoded = CODECS[name].encode(torch.arange(24, dtype=torch.float32).reshape(LAYOUT.shape))
    try:
        block = CODECS[name].decode(damaged(encoded, damages) if keeps else content, LAYOUT)
    except ValueError:
        return
    assert (block.shape, block.dtype) == (LAYOUT.shape, LAYOUT.dtype)
