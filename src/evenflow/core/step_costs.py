"""The linear cost model of a step: seconds = sum of non-negative costs x figures of the step's shape.

Rows are free up to the knee: until there, reading the weights takes longer than multiplying by them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from evenflow.core.least_squares import fit_nonnegative
from evenflow.core.plan import StepShape

_ROWS = 2  # index of a figure
# Candidate knees, in rows.
KNEES = tuple(8 << doubling for doubling in range(9))
# The prior counts as this many steps, each at least as large as this: small ones say little of large ones. Without a
# prior, costs that the samples cannot tell apart are pulled to zero.
_PRIOR_WEIGHT = 1.0
_PRIOR_STEP = (1, 1, 1024, 1 << 23, 64, 1 << 16, 16, 1 << 23)
_NO_PRIOR_WEIGHT = 0.01

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
    wave_attention: float = 0.0
    knee: int = 0
    launch: float = 0.0  # the host's, of a step that is launched op by op: a guess until it has measured one

    def seconds(self, figures: Figures) -> float:
        """Written out for speed: planning a step calls this dozens of times."""
        a, b, c, d, e, f, g, h, knee, _ = self
        step, prefill, rows, attention, logits, context, calls, waves = figures
        seconds = a * step + b * prefill + d * attention + e * logits + f * context + g * calls + h * waves
        return seconds + c * (rows - knee) if rows > knee else seconds


NUM_FIGURES = len(StepCosts._fields) - 2  # all but the knee and the launch


class Sample(NamedTuple):
    """Steps that ran one after the other, and the seconds that they took together."""

    steps: tuple[Figures, ...]
    seconds: float

    def cost(self, costs: StepCosts) -> float:
        return sum(map(costs.seconds, self.steps))


def fit_costs(samples: Sequence[Sample], current: StepCosts, prior: StepCosts, knees: Sequence[int]) -> StepCosts:
    """The costs of least relative error with the first knee, or with another one that is clearly better.

    Samples far from the current costs count less. Knees beyond all their rows are not tried: more rows would be free.
    """
    most = max(prior.knee, *(figures[_ROWS] for sample in samples for figures in sample.steps))
    knees = [knees[0], *(knee for knee in knees[1:] if knee <= most)]
    misfits = [abs(sample.cost(current) / sample.seconds - 1) for sample in samples]
    tolerance = 3 * max(0.01, median(misfits))
    weights = [1.0 if misfit < tolerance else math.sqrt(tolerance / misfit) for misfit in misfits]
    fits = [_fit(samples, weights, knee, prior) for knee in knees]
    losses = [_loss(samples, costs, tolerance) for costs in fits]
    least = min(losses)
    return fits[losses.index(least)] if least < 0.9 * losses[0] else fits[0]


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
    return StepCosts._make((*fit_nonnegative(columns, weights, prior[:NUM_FIGURES], pull, sizes), knee, prior.launch))


def _loss(samples: Sequence[Sample], costs: StepCosts, tolerance: float) -> float:
    """Huber's: errors beyond the tolerance count linearly."""
    misfits = (abs(sample.cost(costs) / sample.seconds - 1) for sample in samples)
    return sum(m * m if m < tolerance else tolerance * (2 * m - tolerance) for m in misfits)
