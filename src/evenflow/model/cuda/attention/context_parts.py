"""Splits long contexts of chunks into parts, so that even a few rows keep all processors of a GPU busy.

FlashAttention 3 gives a processor one tile of a chunk's rows with its whole context: 256 rows of 32 heads keep 64
processors busy, and 640 rows take as long as 1,024 on 132. With parts, one call attends to equal parts of the context,
another to the rows' own positions, and the results are merged. Plain arithmetic on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE_ROWS = 128
MAX_PART_ROWS = 4096  # of chunks, and of all their parts; memory is reserved for them
_MAX_PARTS = 8
# The cost of parts, in positions of a tile: more calls, and each row of a part.
_CALL_COST, _ROW_COST = 1000, 0.8


class Spans(NamedTuple):
    """The sequences of a call: rows, and positions attended to. Sequences without rows skip positions."""

    rows: list[int]
    positions: list[int]


class ContextParts(NamedTuple):
    """Two calls over the positions, and the merges of their results."""

    parts: Spans  # contexts
    own: Spans  # the rows' own positions, from the start of their first block
    part_rows: NDArray[np.int32]  # row of the chunks, for each row of the first call
    merges: NDArray[np.int32]  # for each row of the chunks: first row in `parts`, stride, count


def divide_contexts(
    starts: Sequence[int], lengths: Sequence[int], num_heads: int, num_processors: int, block_size: int
) -> ContextParts | None:
    """None if whole contexts are as fast, or chunks too large. Parts have whole blocks."""
    if sum(lengths) > MAX_PART_ROWS:
        return None
    tiles = [num_heads * -(-length // TILE_ROWS) for length in lengths]
    whole = [start + length for start, length in zip(starts, lengths, strict=True)]
    best_cost, best = _makespan(tiles, whole, num_processors), None
    num_blocks = [start // block_size for start in starts]
    for num_parts in range(2, _MAX_PARTS + 1):
        part_blocks = max(1, -(-max(num_blocks) // num_parts))
        counts = [-(-blocks // part_blocks) for blocks in num_blocks]
        num_rows = sum(count * length for count, length in zip(counts, lengths, strict=True))
        if num_rows > MAX_PART_ROWS:
            break
        part_tiles = [count * tile for count, tile in zip(counts, tiles, strict=True)]
        cost = _makespan(part_tiles, [part_blocks * block_size] * len(tiles), num_processors)
        cost += _makespan(tiles, lengths, num_processors) + _CALL_COST + _ROW_COST * num_rows
        if cost < best_cost:
            best_cost, best = cost, counts
    return None if best is None else _divided(starts, lengths, num_blocks, best, block_size)


def _makespan(tiles: Sequence[int], positions: Sequence[int], num_processors: int) -> float:
    """Positions until the last processor finishes, for tiles of about equal length."""
    num_tiles = sum(tiles)
    if not num_tiles:
        return 0.0
    mean = sum(tile * length for tile, length in zip(tiles, positions, strict=True)) / num_tiles
    return max(max(positions), -(-num_tiles // num_processors) * mean)


def _divided(
    starts: Sequence[int], lengths: Sequence[int], num_blocks: list[int], counts: list[int], block_size: int
) -> ContextParts:
    parts, own = Spans([], []), Spans([], [])
    part_rows, merges = [], []
    first_row = first_part_row = 0
    for start, length, blocks, count in zip(starts, lengths, num_blocks, counts, strict=True):
        context = blocks * block_size
        if count:
            ends = [blocks * (index + 1) // count for index in range(count)]
            parts.rows.extend([length] * count)
            parts.positions.extend(block_size * (end - before) for before, end in zip([0, *ends], ends, strict=False))
            own.rows.append(0)
            own.positions.append(context)
        parts.rows.append(0)
        own.rows.append(length)
        for spans in (parts, own):
            spans.positions.append(start + length - context)
        rows = np.arange(length)
        part_rows.append(np.tile(first_row + rows, count))
        merges.append(np.stack((first_part_row + rows, np.full(length, length), np.full(length, count)), axis=1))
        first_row += length
        first_part_row += count * length
    return ContextParts(parts, own, *(np.concatenate(each).astype(np.int32) for each in (part_rows, merges)))
