"""What each figure of a step costs: a step takes the larger of two sums of costs, none of them negative.

A machine is bound by memory for few rows and by compute for many, hence two sums, called bounds; which is which comes
out of the fit. Must not know: how samples were chosen, speeds that change, clocks.
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
_ROWS, _HAS_PREFILL, _DECODES = 1, 3, 6  # the places of padded rows and others among the features
_NUM_OWN = 3  # of the features, the first ones: a step, its rows, its launch
_KNEES = tuple(8 << doubling for doubling in range(10))  # rows at which to look for the turn from bound to bound
FEW_SAMPLES = 32  # so few that all knees can be tried at once
_MIN_SAMPLES_PER_BOUND = 4
_REFINEMENTS = 2  # of a split by the fit that it gives
# A cost that no sample tells from the others is small for all we know: a doubt worth this many samples. It follows from
# noise of 5% and costs of up to 30% of a step, (0.05 / 0.3) ** 2, and gives the spread of steps that depend on it.
_RIDGE = 0.03

ATTEMPTS = len(_KNEES)  # so many fits try everything


def features_of(shape: StepShape) -> Features:
    """The figures that have a cost each. Rows are computed padded, so that their plain number has none."""
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


def padded_rows(features: Features) -> int:
    return features[_ROWS]


def has_prefill(features: Features) -> bool:
    return features[_HAS_PREFILL] > 0


def is_mixed(features: Features) -> bool:
    return features[_HAS_PREFILL] > 0 and features[_DECODES] > 0


def _sum(costs: Vector, figures: Vector) -> float:
    """Their dot product, written out because planning a step asks for dozens."""
    a, b, c, d, e, f, g, h, i, j, k = costs
    p, q, r, s, t, u, v, w, x, y, z = figures
    return a * p + b * q + c * r + d * s + e * t + f * u + g * v + h * w + i * x + j * y + k * z


@dataclass(frozen=True, slots=True)
class _Bound:
    costs: Vector = (0.0,) * _NUM_FEATURES
    covariance: Matrix | None = None  # of the costs, where errors are 1

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
        """How much wider errors are here than where samples abound (1), by the uncertainty of the costs involved."""
        first_counts = _sum(self.first.costs, features) >= _sum(self.second.costs, features)
        return (self.first if first_counts else self.second).spread(features)


class Fit(NamedTuple):
    costs: StepCosts
    expected_loss: float  # on other samples than those it was fitted to


def candidates(features: list[Features], seconds: list[float], previous: StepCosts, attempt: int) -> Iterator[Fit]:
    """Fits on relative error, each sample to the bound that is the larger for it. Each takes about a millisecond.

    Which bound that is depends on the fit. So the split that the previous costs give competes with splits by rows: with
    all of them while samples are few, later with another one at each attempt, so that no poor split lasts.
    """
    rows = [[figure / s for figure in figures] for figures, s in zip(features, seconds, strict=True)]
    firsts = [_sum(previous.first.costs, row) for row in rows]
    seconds_by_second = [_sum(previous.second.costs, row) for row in rows]
    misfits = [abs(max(pair) - 1) for pair in zip(firsts, seconds_by_second, strict=True)]
    tolerance = 3 * max(0.01, median(misfits))
    # Errors beyond the tolerance count by their size, not their square: an outlier has little pull.
    weights = [1.0 if misfit < tolerance else math.sqrt(tolerance / misfit) for misfit in misfits]
    weighted = [[figure * weight for figure in row] for row, weight in zip(rows, weights, strict=True)]
    knees = _KNEES if len(rows) < FEW_SAMPLES else (_KNEES[attempt % len(_KNEES)],)
    last_split = list(map(ge, firsts, seconds_by_second))
    by_rows = ([figures[_ROWS] < knee for figures in features] for knee in knees)
    splits = [split for split in (last_split, *by_rows) if _is_worthwhile(split)]
    for costs, num_costs in _fits(weighted, weights, splits):
        yield Fit(costs, _expected_loss(costs, num_costs, rows, tolerance))


def _fits(rows: Matrix, targets: Vector, splits: list[list[bool]]) -> Iterator[tuple[StepCosts, int]]:
    yield _fit_together(rows, targets)
    for split in splits:
        yield _fit_sharing(rows, targets, split)
        yield from _fits_apart(rows, targets, split)


def _is_worthwhile(split: list[bool]) -> bool:
    return min(sum(split), len(split) - sum(split)) >= _MIN_SAMPLES_PER_BOUND


def _fit_together(rows: Matrix, targets: Vector) -> tuple[StepCosts, int]:
    """One bound for all samples."""
    columns = _columns(rows)
    return StepCosts(_Bound(*fit_nonnegative(columns, targets, _RIDGE))), _num_costs(columns)


def _fit_sharing(rows: Matrix, targets: Vector, split: list[bool]) -> tuple[StepCosts, int]:
    """Two bounds that differ only in what a step, a row and a launch cost. That fits most machines, by few samples."""
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


def _fits_apart(rows: Matrix, targets: Vector, split: list[bool]) -> Iterator[tuple[StepCosts, int]]:
    """Fits whose bounds have nothing in common, each with the split that the one before gives."""
    for _ in range(_REFINEMENTS):
        if not _is_worthwhile(split):
            return
        costs, num_costs = _fit_apart(rows, targets, split)
        yield costs, num_costs
        split = [_sum(costs.first.costs, row) >= _sum(costs.second.costs, row) for row in rows]


def _fit_apart(rows: Matrix, targets: Vector, split: list[bool]) -> tuple[StepCosts, int]:
    """Two bounds that have nothing in common, as where one roofline holds for the whole step."""
    bounds, num_costs = [], 0
    for half in (split, list(map(not_, split))):
        columns = _columns(compress(rows, half))
        bounds.append(_Bound(*fit_nonnegative(columns, list(compress(targets, half)), _RIDGE)))
        num_costs += _num_costs(columns)
    return StepCosts(*bounds), num_costs


def _num_costs(columns: Iterable[Vector]) -> int:
    """Costs that some sample has a part in: where nothing is launched, launching fits nothing."""
    return sum(1 for column in columns if any(column))


def _columns(rows: Iterable[Vector]) -> list[Vector]:
    return list(zip(*rows, strict=True))


def _expected_loss(costs: StepCosts, num_costs: int, rows: Matrix, tolerance: float) -> float:
    """The loss to expect on other samples, by Akaike's measure: with more costs a fit is closer, but predicts worse."""
    if len(rows) <= num_costs:
        return math.inf
    loss = 0.0
    for row in rows:
        misfit = abs(max(_sum(costs.first.costs, row), _sum(costs.second.costs, row)) - 1)
        loss += misfit * misfit if misfit < tolerance else tolerance * (2 * misfit - tolerance)
    return loss * (len(rows) + num_costs) / (len(rows) - num_costs)
