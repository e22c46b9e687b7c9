"""The cost of each figure of a step. A step takes the larger of two sums of non-negative costs.

The sums are called bounds: few rows are bound by memory, many by compute. The fit decides which bound is which.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress
from operator import ge, not_
from statistics import median
from typing import NamedTuple

from evenflow.core.least_squares import Matrix, Vector, fit_nonnegative
from evenflow.core.plan import StepShape

Features = tuple[int, ...]

_NUM_FEATURES = 11
_ROWS, _HAS_PREFILL = 1, 3  # indexes of features
_NUM_OWN = 3  # the first features: a step, its rows, its launch
_KNEES = tuple(8 << doubling for doubling in range(10))  # candidate row counts at which one bound overtakes the other
ATTEMPTS = len(_KNEES)  # fits that together try every knee
FEW_SAMPLES = 32  # up to here each fit tries every knee
_MIN_SAMPLES_PER_BOUND = 4
_REFINEMENTS = 2
# The prior, in samples, that a cost is zero. It follows from noise of 5% and costs of up to 30% of a step,
# (0.05 / 0.3) ** 2, and widens the spread of steps whose costs the samples cannot tell apart.
_RIDGE = 0.03


def features_of(shape: StepShape) -> Features:
    """The figures that have a cost. Rows are computed padded, so the unpadded number has none."""
    return (
        1,
        shape.padded_rows,
        int(shape.is_launched),
        int(shape.prefill_rows > 0),
        shape.prefill_rows,
        shape.prefill_attention,
        shape.decode_sequences,
        shape.decode_context,
        shape.attention_calls,
        shape.logit_rows,
        shape.wave_attention,
    )


def has_prefill(features: Features) -> bool:
    return features[_HAS_PREFILL] > 0


def _sum(costs: Vector, figures: Vector) -> float:
    """Their dot product, written out for speed: planning a step needs dozens."""
    a, b, c, d, e, f, g, h, i, j, k = costs
    p, q, r, s, t, u, v, w, x, y, z = figures
    return a * p + b * q + c * r + d * s + e * t + f * u + g * v + h * w + i * x + j * y + k * z


@dataclass(frozen=True, slots=True)
class _Bound:
    costs: Vector = (0.0,) * _NUM_FEATURES
    covariance: Matrix | None = None  # of the costs, for errors of 1

    def spread(self, features: Features) -> float:
        seconds = _sum(self.costs, features)
        if not seconds or self.covariance is None:
            return math.inf
        row = [figure / seconds for figure in features]
        return math.sqrt(1 + _sum(row, [_sum(line, row) for line in self.covariance]))


@dataclass(frozen=True, slots=True)
class StepCosts:
    first: _Bound = _Bound()
    second: _Bound = _Bound()

    def seconds(self, features: Features) -> float:
        """Never negative, and never less for more of anything."""
        return max(_sum(self.first.costs, features), _sum(self.second.costs, features))

    def spread(self, features: Features) -> float:
        """How much wider errors are than with many samples (1), from the uncertainty of the costs involved."""
        is_first = _sum(self.first.costs, features) >= _sum(self.second.costs, features)
        return (self.first if is_first else self.second).spread(features)


class Fit(NamedTuple):
    costs: StepCosts
    expected_loss: float  # on samples that it was not fitted to


def fits(features: list[Features], seconds: list[float], previous: StepCosts, attempt: int) -> Iterator[Fit]:
    """Fits of relative error, each sample to its larger bound. Each fit takes about a millisecond.

    Which bound is larger depends on the fit. So the split that the previous costs give competes with splits by rows:
    with all of them while samples are few, later with a different one at each attempt.
    """
    rows = [[figure / s for figure in figures] for figures, s in zip(features, seconds, strict=True)]
    by_first = [_sum(previous.first.costs, row) for row in rows]
    by_second = [_sum(previous.second.costs, row) for row in rows]
    misfits = [abs(max(pair) - 1) for pair in zip(by_first, by_second, strict=True)]
    tolerance = 3 * max(0.01, median(misfits))
    # Errors beyond the tolerance count linearly, not squared: outliers have little influence.
    weights = [1.0 if misfit < tolerance else math.sqrt(tolerance / misfit) for misfit in misfits]
    weighted = [[figure * weight for figure in row] for row, weight in zip(rows, weights, strict=True)]
    knees = _KNEES if len(rows) < FEW_SAMPLES else (_KNEES[attempt % len(_KNEES)],)
    last_split = list(map(ge, by_first, by_second))
    by_rows = ([figures[_ROWS] < knee for figures in features] for knee in knees)
    splits = [split for split in (last_split, *by_rows) if _is_worthwhile(split)]
    for costs, num_costs in _fits(weighted, weights, splits):
        yield Fit(costs, _expected_loss(costs, num_costs, rows, tolerance))


def _fits(rows: Matrix, targets: Vector, splits: list[list[bool]]) -> Iterator[tuple[StepCosts, int]]:
    """Fits of different forms, each with its number of costs."""
    yield _fit_apart(rows, targets, [[True] * len(rows)])
    for split in splits:
        yield _fit_sharing(rows, targets, split)
        for _ in range(_REFINEMENTS):
            if _is_worthwhile(split):
                costs, num_costs = _fit_apart(rows, targets, [split, list(map(not_, split))])
                yield costs, num_costs
                split = [_sum(costs.first.costs, row) >= _sum(costs.second.costs, row) for row in rows]


def _is_worthwhile(split: list[bool]) -> bool:
    return min(sum(split), len(split) - sum(split)) >= _MIN_SAMPLES_PER_BOUND


def _fit_sharing(rows: Matrix, targets: Vector, split: list[bool]) -> tuple[StepCosts, int]:
    """Two bounds that differ only in the cost of a step, a row and a launch. Fits most machines, from few samples."""
    none = (0.0,) * _NUM_OWN
    own = [
        (*row[:_NUM_OWN], *none) if first else (*none, *row[:_NUM_OWN]) for row, first in zip(rows, split, strict=True)
    ]
    columns = [*_columns(own), *_columns(row[_NUM_OWN:] for row in rows)]
    costs, covariance = fit_nonnegative(columns, targets, _RIDGE)
    shared = range(2 * _NUM_OWN, len(columns))
    bounds = (
        _Bound([costs[i] for i in chosen], [[covariance[i][j] for j in chosen] for i in chosen])
        for chosen in ((*range(_NUM_OWN), *shared), (*range(_NUM_OWN, 2 * _NUM_OWN), *shared))
    )
    return StepCosts(*bounds), _num_costs(columns)


def _fit_apart(rows: Matrix, targets: Vector, parts: list[list[bool]]) -> tuple[StepCosts, int]:
    """A bound for each part of the samples, with nothing in common, as for a roofline over the whole step."""
    bounds, num_costs = [], 0
    for part in parts:
        columns = _columns(compress(rows, part))
        bounds.append(_Bound(*fit_nonnegative(columns, list(compress(targets, part)), _RIDGE)))
        num_costs += _num_costs(columns)
    return StepCosts(*bounds), num_costs


def _num_costs(columns: Iterable[Vector]) -> int:
    """Costs that any sample depends on."""
    return sum(1 for column in columns if any(column))


def _columns(rows: Iterable[Vector]) -> list[Vector]:
    return list(zip(*rows, strict=True))


def _expected_loss(costs: StepCosts, num_costs: int, rows: Matrix, tolerance: float) -> float:
    """The loss on other samples by Akaike's final prediction error, which penalises the number of costs."""
    if len(rows) <= num_costs:
        return math.inf
    loss = 0.0
    for row in rows:
        misfit = abs(max(_sum(costs.first.costs, row), _sum(costs.second.costs, row)) - 1)
        loss += misfit * misfit if misfit < tolerance else tolerance * (2 * misfit - tolerance)
    return loss * (len(rows) + num_costs) / (len(rows) - num_costs)
