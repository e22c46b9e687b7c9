"""How attention is cut into programs: every position of every tile exactly once, whatever the sizes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.splits import Splitting, Table, chunk_tiles, decode_tiles, decode_units, schedule


def _layout(decode_contexts: list[int], chunks: list[tuple[int, int]]) -> StepLayout:
    no_tensor = torch.empty(0)
    starts, lengths = [start for start, _ in chunks], [length for _, length in chunks]
    return StepLayout(decode_contexts, starts, lengths, no_tensor, no_tensor, block_size=16)


def _splitting(**changes: int | bool) -> Splitting:
    return Splitting(**{"min_length": 32, "num_programs": 8, "num_slots": 100, "unit_is_part": False, **changes})


def test_a_decode_is_a_tile_and_a_chunk_is_cut_into_tiles() -> None:
    layout = _layout([7, 1], [(100, 5), (0, 2)])
    assert decode_tiles(layout).tolist() == [[0, 0, 1, 6], [1, 1, 1, 0]]
    assert chunk_tiles(layout, 3).tolist() == [[2, 2, 3, 100], [2, 5, 2, 103], [3, 7, 2, 0]]
    assert len(decode_tiles(_layout([], []))) == len(chunk_tiles(_layout([], []), 3)) == 0


def test_a_lone_long_tile_is_split_and_many_tiles_are_not() -> None:
    lone = schedule(decode_tiles(_layout([200], [])), 16, _splitting(num_programs=4))
    assert lone.items[:, 4:7].tolist() == [[0, 64, 0], [64, 128, 1], [128, 192, 2], [192, 200, 3]]
    assert lone.merges.tolist() == [[0, 1, 0, 4]]
    many = schedule(decode_tiles(_layout([200] * 10, [])), 16, _splitting())
    assert set(many.items[:, 6]) == {-1}
    assert len(many.merges) == 0


def test_a_graph_has_the_same_number_of_programs_for_any_contexts() -> None:
    padded = schedule(decode_tiles(_layout([200], [])), 16, _splitting()).padded(9, 1)
    assert padded.items.shape == (9, 8)
    assert not padded.items[7:].any()
    assert padded.size == padded.items.size + padded.merges.size


def test_a_decodes_parts_follow_from_its_own_context() -> None:
    units = decode_units(np.array([1, 128, 129, 4096, 4097, 8192, 8193, 131_072]), min_length=128)
    assert units.tolist() == [128, 128, 128, 128, 256, 256, 512, 4096]


_TILES = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5000)), min_size=1, max_size=30)


@given(
    tiles=_TILES,
    unit=st.sampled_from([16, 64, 512]),
    min_length=st.integers(1, 600),
    num_programs=st.integers(1, 70),
    num_slots=st.integers(0, 60),
    unit_is_part=st.booleans(),
)
def test_splits_cover_every_tile_once(
    tiles: list[tuple[int, int]], unit: int, min_length: int, num_programs: int, num_slots: int, unit_is_part: bool
) -> None:
    table: Table = np.array([(row, row, *tile) for row, tile in enumerate(tiles)], dtype=np.int32)
    splitting = Splitting(min_length, num_programs, num_slots, unit_is_part)
    planned = schedule(table, np.array([unit << row % 3 for row in range(len(tiles))]), splitting)
    assert len(planned.items) <= len(tiles) + num_programs
    merges = {first_row: (first, count) for first_row, _, first, count in planned.merges.tolist()}
    used: list[int] = []
    for row, (tokens, position) in enumerate(tiles):
        items = sorted(planned.items[planned.items[:, 0] == row].tolist(), key=lambda item: item[4])
        assert [item[1:4] for item in items] == [[row, tokens, position]] * len(items)
        assert [begin for *_, begin, _, _, _ in items] == [0, *(end for *_, end, _, _ in items[:-1])]
        assert items[-1][5] == position + tokens
        assert all(item[4] % (unit << row % 3) == 0 and item[7] == unit << row % 3 for item in items)
        if len(items) == 1:
            assert items[0][6] == -1
            assert row not in merges
        else:
            slots = [
                slot + part
                for *_, begin, end, slot, _ in items
                for part in range(-(-(end - begin) // (unit << row % 3)) if unit_is_part else 1)
            ]
            first, count = merges[row]
            assert slots == list(range(first, first + count))
            used += slots
    assert sorted(used) == list(range(len(used)))
    assert len(used) <= num_slots
