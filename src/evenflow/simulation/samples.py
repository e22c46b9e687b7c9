"""Samples in cells of time, as histograms: percentiles of all of them, and the interval that those of a single run fall
in, nine times of ten. Whole cells and whole runs are resampled. Samples drawn one by one would pretend to be sure.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

CONFIDENCE = 0.9
_RESAMPLES = 200
_BINS_PER_E = 200  # 0.5% wide

Histogram = Counter[int]  # samples by the logarithm of their value


def bin_of(value: float) -> int:
    return round(_BINS_PER_E * math.log(max(value, 1e-9)))


def value_of(number: int) -> float:
    return math.exp(number / _BINS_PER_E)


@dataclass(slots=True)
class Samples:
    """One kind of sample, by cells of time."""

    cell_s: float
    cells: dict[int, Histogram] = field(default_factory=dict)

    def add(self, value: float, at: float, count: int = 1) -> None:
        number = int(at / self.cell_s)
        if (cell := self.cells.get(number)) is None:
            cell = self.cells[number] = Counter()
        cell[bin_of(value)] += count

    def update(self, other: Samples) -> None:
        """Add those of another one with the same cells."""
        for number, cell in other.cells.items():
            self.cells.setdefault(number, Counter()).update(cell)

    def total(self) -> Histogram:
        return _added(self.cells.values())

    @property
    def count(self) -> int:
        return sum(cell.total() for cell in self.cells.values())


def percentile(histogram: Mapping[int, int], percent: float) -> float | None:
    """The smallest value that this share does not exceed; None if there are no samples."""
    bins = sorted(histogram)
    totals = list(accumulate(histogram[one] for one in bins))
    if not totals or not totals[-1]:
        return None
    return value_of(bins[bisect_left(totals, totals[-1] * percent / 100)])


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its 90% interval; all None where it is unknown."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        return self.value is not None

    def as_json(self) -> dict[str, Any]:
        return {"value": self.value, "low": self.low, "high": self.high}


UNKNOWN = Interval(None)
Figure = Callable[[Histogram], float | None]


def intervals(runs: Sequence[Samples], figures: Mapping[str, Figure], seed: int = 0) -> dict[str, Interval]:
    """Each figure of all runs together, and where that of a single run falls: one is drawn, and cells of time in it."""
    rng = random.Random(seed)
    totals: Histogram = Counter()
    for run in runs:
        totals.update(run.total())
    cells = [list(run.cells.values()) for run in runs if run.cells]
    drawn: dict[str, list[float]] = {name: [] for name in figures}
    for _ in range(_RESAMPLES if cells else 0):
        sample: Histogram = Counter()
        of_run = rng.choice(cells)
        for cell, times in Counter(rng.choices(range(len(of_run)), k=len(of_run))).items():
            for number, count in of_run[cell].items():
                sample[number] += times * count
        for name, figure in figures.items():
            if (value := figure(sample)) is not None:
                drawn[name].append(value)
    return {name: _interval(figure(totals), sorted(drawn[name])) for name, figure in figures.items()}


def spread_of(values: Sequence[float]) -> Interval:
    """The mean of a figure that each run has one of, and where single runs fall."""
    return _interval(sum(values) / len(values), sorted(values)) if values else UNKNOWN


def _interval(value: float | None, drawn: Sequence[float]) -> Interval:
    if value is None or not drawn:
        return Interval(value)
    tail = (1 - CONFIDENCE) / 2
    low, high = (drawn[min(len(drawn) - 1, int(share * len(drawn)))] for share in (tail, 1 - tail))
    return Interval(value, min(low, value), max(high, value))


def sampling_error(runs: Sequence[Sequence[Samples]], percent: float, seed: int = 0) -> float:
    """How far the choice of parts may have moved a percentile, as a share of it: nine of ten draws are within."""
    rng = random.Random(seed)
    totals = [[part.total() for part in run] for run in runs]
    everything = percentile(_added(part for run in totals for part in run), percent)
    if not everything:
        return 0.0
    drawn = [
        percentile(_added(part for run in totals for part in rng.choices(run, k=len(run))), percent)
        for _ in range(_RESAMPLES)
    ]
    off = sorted(abs((value or 0.0) / everything - 1) for value in drawn)
    return off[int(CONFIDENCE * len(off))]


def _added(parts: Iterable[Histogram]) -> Histogram:
    total: Histogram = Counter()
    for part in parts:
        total.update(part)
    return total
