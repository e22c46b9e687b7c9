"""Figures of lengths, against the plain way to reckon them."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evenflow.advisor.lengths import Lengths

VALUES = st.lists(st.integers(1, 200_000), min_size=1, max_size=200)


@given(VALUES)
def test_figures(values: list[int]) -> None:
    figures, ordered = Lengths(values).figures(), sorted(values)
    assert (figures.count, figures.total) == (len(values), sum(values))
    assert (figures.min, figures.max) == (min(values), max(values))
    assert math.isclose(figures.mean, statistics.fmean(values))
    assert figures.p50 == ordered[math.ceil(len(values) / 2) - 1]
    assert figures.p95 == ordered[-(-len(values) * 95 // 100) - 1]


@given(VALUES, st.integers(0, 200_001))
def test_share_over(values: list[int], threshold: int) -> None:
    assert Lengths(values).share_over(threshold) == sum(value > threshold for value in values) / len(values)


@given(VALUES)
def test_buckets_hold_everything_once(values: list[int]) -> None:
    buckets = Lengths(values).buckets()
    assert sum(bucket.count for bucket in buckets) == len(values)
    assert all(before.high == after.low for before, after in pairwise(buckets))
    for bucket in buckets:
        assert bucket.count == sum(bucket.low <= value < bucket.high for value in values)


@given(VALUES, VALUES)
def test_a_union_is_both(first: list[int], second: list[int]) -> None:
    assert Lengths(Lengths(first) + Lengths(second)).figures() == Lengths(first + second).figures()


@given(VALUES)
def test_the_cumulative_share_ends_at_all(values: list[int]) -> None:
    lengths, shares = Lengths(values).cumulative()
    assert lengths == sorted(set(values))
    assert shares[-1] == 1
    assert shares == sorted(shares)
