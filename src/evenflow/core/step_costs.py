"""What a step costs by its figures: seconds = sum of non-negative costs x figures.

Rows are free up to the knee, where reading the weights still takes longer than multiplying by them. A step that is
launched op by op takes no less than that does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from evenflow.core.least_squares import fit_nonnegative
from evenflow.core.plan import StepShape

_ROWS, _LAUNCHED = 2, 7  # indices of figures
# Candidate knees, in rows.
KNEES = tuple(8 << doubling for doubling in range(9))
# The prior counts as this many steps, each at least as large as this: small ones say little of large ones. Without a
# prior, costs that the samples cannot tell apart are pulled to zero.
_PRIOR_WEIGHT = 1.0
_PRIOR_STEP = (1, 1, 1024, 1 << 23, 64, 1 << 16, 16, 1, 1 << 23)
_NO_PRIOR_WEIGHT = 0.01
_NEGLIGIBLE_LOSS = 2e-4  # no reason for another knee

Figures = tuple[int, ...]


def figures_of(shape: StepShape) -> Figures:
    """The figures that have a cost."""
    return (
        1,
        int(shape.prefill_rows > 0),
        shape.padded_rows,
        shape.prefill_attention,
        shape.logit_rows,
        shape.decode_context,
        shape.attention_calls,
        int(shape.is_launched),
        shape.wave_attention,
    )


class StepCosts(NamedTuple):
    """Seconds for one of each figure, in the order of `figures_of`."""

    step: float = 0.0
    prefill: float = 0.0  # a step with prefill, on top
    row: float = 0.0  # beyond the knee
    attention: float = 0.0
    logits: float = 0.0
    context: float = 0.0
    call: float = 0.0
    launch: float = 0.0  # the host's, while the device computes what is launched already
    wave_attention: float = 0.0
    knee: int = 0

    def seconds(self, figures: Figures) -> float:
        """Written out for speed: planning a step takes dozens."""
        a, b, c, d, e, f, g, h, i, knee = self
        step, prefill, rows, attention, logits, context, calls, launched, waves = figures
        linear = a * step + b * prefill + d * attention + e * logits + f * context + g * calls + i * waves
        if rows > knee:
            linear += c * (rows - knee)
        return h if launched and h > linear else linear


class Sample(NamedTuple):
    """Steps that ran one after the other, and the seconds that they took together."""

    steps: tuple[Figures, ...]
    seconds: float

    def cost(self, costs: StepCosts) -> float:
        return sum(map(costs.seconds, self.steps))


def fit_costs(samples: Sequence[Sample], current: StepCosts, prior: StepCosts, knees: Sequence[int]) -> StepCosts:
    """The costs of least relative error with the first knee, or with another one that is clearly better.

    Samples far from the current costs count less.
    """
    misfits = [abs(sample.cost(current) / sample.seconds - 1) for sample in samples]
    tolerance = 3 * max(0.01, median(misfits))
    weights = [1.0 if misfit < tolerance else math.sqrt(tolerance / misfit) for misfit in misfits]
    bound = [Sample(tuple(_bound_by(figures, current) for figures in steps), seconds) for steps, seconds in samples]
    fits = [_fit(bound, weights, knee, prior) for knee in knees]
    losses = [_loss(samples, costs, tolerance) for costs in fits]
    least = min(losses)
    return fits[losses.index(least)] if least < 0.9 * losses[0] - _NEGLIGIBLE_LOSS else fits[0]


def _bound_by(figures: Figures, costs: StepCosts) -> Figures:
    """The figures that a step's seconds depend on: of a launched one its launch, or all others."""
    if not figures[_LAUNCHED]:
        return figures
    is_launch = costs.seconds(figures) <= costs.launch
    return tuple(figure if (index == _LAUNCHED) == is_launch else 0 for index, figure in enumerate(figures))


def _fit(samples: Sequence[Sample], weights: Sequence[float], knee: int, prior: StepCosts) -> StepCosts:
    rows = []
    for sample, weight in zip(samples, weights, strict=True):
        totals = [sum(figures) for figures in zip(*sample.steps, strict=True)]
        totals[_ROWS] = sum(max(0, figures[_ROWS] - knee) for figures in sample.steps)
        rows.append([weight * total / sample.seconds for total in totals])
    columns = list(zip(*rows, strict=True))
    seconds = prior.seconds(_PRIOR_STEP)
    sizes = [figure / seconds if seconds else 0.0 for figure in _PRIOR_STEP]
    pull = _PRIOR_WEIGHT if seconds else _NO_PRIOR_WEIGHT
    return StepCosts._make((*fit_nonnegative(columns, weights, prior[:-1], pull, sizes), knee))


def _loss(samples: Sequence[Sample], costs: StepCosts, tolerance: float) -> float:
    """Huber's: errors beyond the tolerance count linearly."""
    misfits = (abs(sample.cost(costs) / sample.seconds - 1) for sample in samples)
    return sum(m * m if m < tolerance else tolerance * (2 * m - tolerance) for m in misfits)
