"""How the attention of a step is cut into programs: tiles of rows, and splits of a tile's KV if there are few tiles.

Plain arithmetic on the host, without the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenflow.model.cuda.attention import StepLayout

Table = NDArray[np.int32]

# Sequence, first row, tokens, position of the first token, first and last KV position, slot or -1, unit.
ITEM_FIELDS = 8
MERGE_FIELDS = 4  # first row, tokens, first slot, number of slots
_MOST_PARTS = 32  # of a decode's context
# How much longer than an even share splits may be: longer ones are fewer, which may save programs a second round.
_SLACKS = (1.0, 1.25, math.inf)
_MERGE_COST = 64  # positions that a program could read meanwhile


@dataclass(frozen=True, slots=True)
class Splitting:
    """What splits are allowed and worth it."""

    least: int  # positions; a shorter split costs more to merge than it saves
    num_programs: int  # that fill the device, for each KV head
    num_slots: int  # parts that the workspace holds
    unit_is_part: (
        bool  # every unit is reduced apart and merged in order, so that a result does not depend on the splits
    )


@dataclass(frozen=True, slots=True)
class Schedule:
    """One row for each program of a KV head, and one for each tile that several programs share."""

    items: Table
    merges: Table

    @property
    def size(self) -> int:
        return self.items.size + self.merges.size

    def padded(self, num_items: int, num_merges: int) -> Schedule:
        """With rows of zeros, which name no tokens."""
        return Schedule(_padded(self.items, num_items), _padded(self.merges, num_merges))


def _padded(table: Table, num_rows: int) -> Table:
    assert len(table) <= num_rows, f"{len(table)} rows planned for a graph that has {num_rows}"
    return np.pad(table, ((0, num_rows - len(table)), (0, 0)))


def decode_tiles(layout: StepLayout) -> Table:
    """[tiles, (sequence, first row, tokens, position of the first token)]"""
    sequences = np.arange(layout.num_decodes)
    positions = np.asarray(layout.decode_contexts, dtype=np.int64) - 1
    return np.stack((sequences, sequences, np.ones_like(sequences), positions), axis=1).astype(np.int32)


def decode_units(contexts: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """In how large parts decodes reduce their contexts: powers of two, at most `_MOST_PARTS` of them.

    It follows from a decode's own context alone, so that its result does not depend on the others.
    """
    shares = np.maximum(_ceil_div(contexts, _MOST_PARTS), least)
    return np.int64(1) << np.ceil(np.log2(shares)).astype(np.int64)


def chunk_tiles(layout: StepLayout, tokens_per_tile: int) -> Table:
    """As `decode_tiles`."""

    def tiles() -> Iterator[tuple[int, int, int, int]]:
        row = layout.num_decodes
        for index, (start, length) in enumerate(zip(layout.chunk_starts, layout.chunk_lengths, strict=True)):
            for done in range(0, length, tokens_per_tile):
                tokens = min(tokens_per_tile, length - done)
                yield layout.num_decodes + index, row + done, tokens, start + done
            row += length

    return np.array(list(tiles()), dtype=np.int32).reshape(-1, 4)


def schedule(tiles: Table, units: NDArray[np.int64] | int, splitting: Splitting) -> Schedule:
    """At most `len(tiles) + num_programs` items, the longest first, so that short ones fill the gaps at the end.

    A split begins at a multiple of its tile's unit of positions.
    """
    ends = (tiles[:, 3] + tiles[:, 2]).astype(np.int64)
    units = np.broadcast_to(units, len(tiles))
    lengths = min((_lengths(ends, units, slack, splitting) for slack in _SLACKS), key=partial(_cost, ends, splitting))
    counts = _ceil_div(ends, lengths)

    tile = np.repeat(np.arange(len(tiles)), counts)
    index_in_tile = np.arange(len(tile)) - np.repeat(counts.cumsum() - counts, counts)
    begins = index_in_tile * lengths[tile]
    stops = np.minimum(begins + lengths[tile], ends[tile])
    parts = _num_parts(ends, units, counts, splitting)
    first_slots = parts.cumsum() - parts
    parts_before = begins // units[tile] if splitting.unit_is_part else index_in_tile
    slots = np.where(counts[tile] > 1, first_slots[tile] + parts_before, -1)

    items = np.zeros((len(tile), ITEM_FIELDS), dtype=np.int32)
    items[:, :4], items[:, 4], items[:, 5], items[:, 6], items[:, 7] = tiles[tile], begins, stops, slots, units[tile]
    shared = counts > 1
    merges = np.stack((tiles[:, 1], tiles[:, 2], first_slots, parts), axis=1)[shared].astype(np.int32)
    return Schedule(items[np.argsort(begins - stops, kind="stable")], merges)


def _lengths(
    ends: NDArray[np.int64], units: NDArray[np.int64], slack: float, splitting: Splitting
) -> NDArray[np.int64]:
    """Of the splits of each tile, in whole units."""
    share = min(slack * ends.sum() / splitting.num_programs, float(ends.max()))
    counts = _ceil_div(ends, max(splitting.least, int(share)))
    counts[_num_parts(ends, units, counts, splitting).cumsum() > splitting.num_slots] = 1
    return _ceil_div(_ceil_div(ends, counts), units) * units


def _cost(ends: NDArray[np.int64], splitting: Splitting, lengths: NDArray[np.int64]) -> float:
    """About the positions until the last program is done."""
    counts = _ceil_div(ends, lengths)
    num_items = int(counts.sum())
    rounds = -(-num_items // splitting.num_programs)
    longest = int(np.minimum(ends, lengths).max())
    return max(longest, rounds * int(ends.sum()) / num_items) + _MERGE_COST * bool((counts > 1).any())


def _num_parts(
    ends: NDArray[np.int64], units: NDArray[np.int64], counts: NDArray[np.int64], splitting: Splitting
) -> NDArray[np.int64]:
    """Slots that each tile needs; none if one program does all of it."""
    return np.where(counts > 1, _ceil_div(ends, units) if splitting.unit_is_part else counts, 0)


def _ceil_div(values: NDArray[np.int64], divisors: NDArray[np.int64] | int) -> NDArray[np.int64]:
    return -(-values // divisors)
