"""Percentiles of histograms, and intervals that resample cells and runs."""

from __future__ import annotations

import random
from functools import partial
from statistics import median

import pytest

from evenflow.simulation.samples import Histogram, Samples, bin_of, intervals, percentile, spread_of

P50 = {"p50": partial(percentile, percent=50)}


@pytest.mark.parametrize("value", [1e-6, 0.0123, 1.0, 250.0])
def test_a_bin_is_half_a_percent_wide(value: float) -> None:
    assert percentile({bin_of(value): 1}, 50) == pytest.approx(value, rel=0.0026)


def test_percentiles_are_the_smallest_values_that_are_not_exceeded() -> None:
    histogram = Histogram({bin_of(value): 1 for value in range(1, 101)})
    for percent in (1, 50, 99, 100):
        assert percentile(histogram, percent) == pytest.approx(percent, rel=0.01)
    assert percentile({}, 50) is None


def drawn(rng: random.Random, runs: int, cells: int, per_cell: int, between: float) -> list[Samples]:
    """Samples of one cell are equal: only whole cells and runs say something new."""
    found = []
    for _ in range(runs):
        of_run, samples = rng.gauss(0.0, between), Samples(1.0)
        for cell in range(cells):
            samples.add(2.718 ** (of_run + rng.gauss(0.0, 0.1)), cell + 0.5, per_cell)
        found.append(samples)
    return found


def test_more_tokens_of_the_same_moments_make_an_interval_no_narrower() -> None:
    few, many = (intervals(drawn(random.Random(1), 5, 20, count, 0.05), P50)["p50"] for count in (1, 1000))
    assert few == many
    assert few.low is not None
    assert few.high is not None
    assert few.low < few.high


def test_intervals_cover_another_run() -> None:
    """More runs do not make them narrower: the other one is a single run."""
    rng = random.Random(2)
    for runs in (10, 20):
        found = [intervals(drawn(rng, runs, 20, 3, 0.05), P50, seed=number)["p50"] for number in range(40)]
        others = [intervals(drawn(rng, 1, 20, 3, 0.05), P50)["p50"].value or 0 for _ in found]
        covered = sum((one.low or 0) <= real <= (one.high or 0) for one, real in zip(found, others, strict=True))
        assert 0.8 <= covered / len(found) <= 1.0
        assert 0.12 < median((one.high or 0) - (one.low or 0) for one in found) < 0.3


def test_one_value_for_each_run() -> None:
    found = spread_of([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert (found.low, found.high) == (1.0, 3.0)
    assert not spread_of([]).is_known
    assert not intervals([Samples(1.0)], P50)["p50"].is_known
