"""Divides a step's attention among programs: tiles of rows, and splits of a tile's KV if tiles are few.

Plain arithmetic on the host, without the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from evenflow.model.cuda.attention.backend import StepLayout

Table = NDArray[np.int32]

# Sequence, first row, tokens, position of the first token, first and last KV position, slot or -1, unit.
ITEM_FIELDS = 8
MERGE_FIELDS = 4  # first row, tokens, first slot, number of slots
_MAX_PARTS = 32  # of a decode's context
# Allowed length of splits over an even share: fewer, longer splits may avoid a second round of programs.
_SLACKS = (1.0, 1.25, math.inf)
_MERGE_COST = 64  # in positions read by a program


@dataclass(frozen=True, slots=True)
class Splitting:
    """Limits on splits."""

    min_length: int  # positions; a shorter split costs more to merge than it saves
    num_programs: int  # per KV head, to fill the device
    num_slots: int  # parts in the workspace
    unit_is_part: bool  # units are reduced separately: results do not depend on the splits


@dataclass(frozen=True, slots=True)
class Schedule:
    """Items: a row for each program of a KV head. Merges: a row for each tile shared by several programs."""

    items: Table
    merges: Table

    @property
    def size(self) -> int:
        return self.items.size + self.merges.size

    def padded(self, num_items: int, num_merges: int) -> Schedule:
        """Padded with rows of zeros, which have no tokens."""
        return Schedule(_padded(self.items, num_items), _padded(self.merges, num_merges))


def _padded(table: Table, num_rows: int) -> Table:
    assert len(table) <= num_rows, f"{len(table)} rows planned for a graph that has {num_rows}"
    return np.pad(table, ((0, num_rows - len(table)), (0, 0)))


def decode_tiles(layout: StepLayout) -> Table:
    """[tiles, (sequence, first row, tokens, position of the first token)]"""
    sequences = np.arange(layout.num_decodes)
    positions = np.asarray(layout.decode_contexts, dtype=np.int64) - 1
    return np.stack((sequences, sequences, np.ones_like(sequences), positions), axis=1).astype(np.int32)


def decode_units(contexts: NDArray[np.int64], min_length: int) -> NDArray[np.int64]:
    """Sizes of the parts of decodes' contexts: powers of two, for at most `_MAX_PARTS` parts.

    A size depends on the decode's own context alone, so its result does not depend on other decodes.
    """
    shares = np.maximum(_ceil_div(contexts, _MAX_PARTS), min_length)
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
    """At most `len(tiles) + num_programs` items, longest first, so that short ones fill the gaps at the end.

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
    """Lengths of each tile's splits, in whole units."""
    share = min(slack * ends.sum() / splitting.num_programs, float(ends.max()))
    counts = _ceil_div(ends, max(splitting.min_length, int(share)))
    counts[_num_parts(ends, units, counts, splitting).cumsum() > splitting.num_slots] = 1
    return _ceil_div(_ceil_div(ends, counts), units) * units


def _cost(ends: NDArray[np.int64], splitting: Splitting, lengths: NDArray[np.int64]) -> float:
    """Estimated positions until the last program finishes."""
    counts = _ceil_div(ends, lengths)
    num_items = int(counts.sum())
    rounds = -(-num_items // splitting.num_programs)
    longest = int(np.minimum(ends, lengths).max())
    return max(longest, rounds * int(ends.sum()) / num_items) + _MERGE_COST * bool((counts > 1).any())


def _num_parts(
    ends: NDArray[np.int64], units: NDArray[np.int64], counts: NDArray[np.int64], splitting: Splitting
) -> NDArray[np.int64]:
    """Part slots of each tile; 0 if one program reads all of it."""
    return np.where(counts > 1, _ceil_div(ends, units) if splitting.unit_is_part else counts, 0)


def _ceil_div(values: NDArray[np.int64], divisors: NDArray[np.int64] | int) -> NDArray[np.int64]:
    return -(-values // divisors)
