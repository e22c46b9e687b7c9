"""Packed logprobs are the rows that were packed, in any pieces."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenflow.core.logprobs import LogprobRows, RowLogprobs, TokenLogprob

TOKENS = st.builds(TokenLogprob, st.integers(0, 2**31 - 1), st.floats(max_value=0, width=32, allow_nan=False))


@st.composite
def rows(draw: st.DrawFn) -> list[RowLogprobs]:
    num_top = draw(st.integers(0, 5))
    top = st.tuples(*[TOKENS] * num_top)
    return draw(st.lists(st.builds(RowLogprobs, TOKENS, top), max_size=8))


@given(rows())
def test_rows_come_back_as_they_were(packed: list[RowLogprobs]) -> None:
    found = LogprobRows.of(packed)
    assert list(found) == packed
    assert len(found) == len(packed)
    assert list(found.chosen) == [row.chosen.logprob for row in packed]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=LogprobRows) == found


@given(rows(), st.slices(8))
def test_a_slice_is_that_of_a_list(packed: list[RowLogprobs], cut: slice) -> None:
    assert list(LogprobRows.of(packed)[cut]) == packed[cut]


@given(rows(), st.integers(0, 8))
def test_parts_join_to_the_whole(packed: list[RowLogprobs], cut: int) -> None:
    whole = LogprobRows.of(packed)
    assert LogprobRows.joined([LogprobRows(), whole[:cut], whole[cut:]]) == whole


def test_there_is_no_row_beyond_the_last() -> None:
    found = LogprobRows.of([RowLogprobs(TokenLogprob(3, -1.0), ())])
    assert found[-1] == found[0]
    with pytest.raises(IndexError):
        found[1]
