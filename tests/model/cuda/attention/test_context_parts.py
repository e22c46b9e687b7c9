"""Contexts in parts: every row attends to every position exactly once, and only where it saves time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenflow.model.cuda.attention.context_parts import MAX_PART_ROWS, ContextParts, Spans, divide_contexts

_BLOCK = 16


def _divided(*chunks: tuple[int, int]) -> ContextParts | None:
    starts, lengths = zip(*chunks, strict=True)
    return divide_contexts(starts, lengths, num_heads=32, num_processors=132, block_size=_BLOCK)


def _counts(divided: ContextParts | None) -> list[int]:
    assert divided is not None
    return sorted(set(divided.merges[:, 2].tolist()))


def test_few_rows_are_divided_until_they_fill_the_processors() -> None:
    assert _counts(_divided((32_768, 128))) == [4]  # 32 tiles of 132
    assert _counts(_divided((32_768, 256))) == [2]
    assert _counts(_divided((32_768, 640))) == [4]  # 160 tiles: five waves of a quarter, not two of a whole


def test_rows_that_fill_the_processors_and_short_contexts_are_left_whole() -> None:
    assert _divided((32_768, 512)) is None
    assert _divided((32_768, 1024)) is None
    assert _divided((0, 200)) is None
    assert _divided((1000, 200)) is None
    assert _divided((60_000, MAX_PART_ROWS + 1)) is None


def _attended(spans: Spans, rows: NDArray[np.int32], num_blocks: int) -> NDArray[np.int64]:
    """How often each row attends to each block in a call."""
    times = np.zeros((rows.max() + 1, num_blocks), dtype=np.int64)
    row = block = 0
    for num_rows, num_positions in zip(*spans, strict=True):
        assert num_positions > 0
        last = block - -num_positions // _BLOCK
        np.add.at(times, np.ix_(rows[row : row + num_rows], range(block, last)), 1)
        row, block = row + num_rows, last
    assert (row, block) == (len(rows), num_blocks)
    return times


_CHUNKS = st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 700)), min_size=1, max_size=3)


@given(_CHUNKS)
@settings(deadline=None, max_examples=50)
def test_each_row_attends_to_each_block_once(chunks: list[tuple[int, int]]) -> None:
    divided = _divided(*chunks)
    if divided is None:
        return
    num_blocks = [-(-(start + length) // _BLOCK) for start, length in chunks]
    lengths = [length for _, length in chunks]
    own_rows = np.arange(sum(lengths), dtype=np.int32)
    assert len(divided.part_rows) <= MAX_PART_ROWS
    times = _attended(divided.own, own_rows, sum(num_blocks))
    of_parts = _attended(divided.parts, divided.part_rows, sum(num_blocks))
    times[: len(of_parts)] += of_parts
    chunk_of_row = np.repeat(np.arange(len(chunks)), lengths)
    chunk_of_block = np.repeat(np.arange(len(chunks)), num_blocks)
    assert np.array_equal(times, chunk_of_row[:, None] == chunk_of_block[None, :])


@given(_CHUNKS)
@settings(deadline=None, max_examples=50)
def test_merges_name_the_parts_of_their_row(chunks: list[tuple[int, int]]) -> None:
    divided = _divided(*chunks)
    if divided is None:
        return
    named = []
    for row, (first, distance, count) in enumerate(divided.merges.tolist()):
        parts = [first + index * distance for index in range(count)]
        assert all(divided.part_rows[part] == row for part in parts)
        named += parts
    assert sorted(named) == list(range(len(divided.part_rows)))
