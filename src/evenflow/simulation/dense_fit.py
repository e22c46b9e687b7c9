"""Seconds of a step of any shape, by costs of many figures fitted to recorded steps. More figures than the engine's own
model has, and no prior: it is to reproduce a recording, not to learn from a few steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from evenflow.core.least_squares import fit_nonnegative
from evenflow.core.plan import ExecutorCaps
from evenflow.simulation.devices import StepWork

_KNEES = (32, 64, 128, 256, 512, 1024)  # row counts from which a row may cost more
_MAX_FITTED = 6000


class DenseFit:
    """Costs of a step's figures."""

    def __init__(self, caps: ExecutorCaps, costs: Sequence[float]) -> None:
        self.costs = tuple(costs)
        self._caps = caps
        self._of_decodes: tuple[int, float, float] = (0, 0.0, 0.0)  # a count, its seconds, and those of a position

    @classmethod
    def fitted(cls, caps: ExecutorCaps, works: Sequence[StepWork], seconds: Sequence[float]) -> DenseFit:
        """By relative error. Outliers get less weight in each further round."""
        every = max(1, len(works) // _MAX_FITTED)
        rows = [
            [figure / taken for figure in figures_of(work, caps)]
            for work, taken in zip(works[::every], seconds[::every], strict=True)
        ]
        weights = [1.0] * len(rows)
        costs: list[float] = []
        for _ in range(3):
            weighted = ([figure * weight for figure in row] for row, weight in zip(rows, weights, strict=True))
            columns = list(zip(*weighted, strict=True))
            costs = fit_nonnegative(columns, weights, [0.0] * len(columns), 1e-6)
            misfits = [abs(sum(map(float.__mul__, costs, row)) - 1) for row in rows]
            tolerance = 3 * median(misfits)
            weights = [1.0 if misfit < tolerance else math.sqrt(tolerance / misfit) for misfit in misfits]
        return cls(caps, costs)

    def seconds(self, work: StepWork) -> float:
        if not work.chunks:  # the same for many steps in a row, but for the context
            count, seconds, per_position = self._of_decodes
            if count != work.num_decodes:
                empty = figures_of(StepWork(work.num_decodes, 0, ()), self._caps)
                seconds, per_position = sum(map(float.__mul__, self.costs, empty)), self.costs[_CONTEXT]
                self._of_decodes = work.num_decodes, seconds, per_position
            return seconds + per_position * work.decode_context
        return sum(map(float.__mul__, self.costs, figures_of(work, self._caps)))


def figures_of(work: StepWork, caps: ExecutorCaps) -> list[float]:
    shape = work.shape(caps)
    return [
        1.0,
        float(bool(work.chunks)),
        float(shape.is_launched),
        *(float(max(0, shape.padded_rows - knee)) for knee in _KNEES),
        float(shape.prefill_attention),
        float(shape.wave_attention),
        float(sum(start + length for start, length in work.chunks)),
        float(len(work.chunks)),
        float(work.num_decodes),
        float(work.decode_context),
        float(work.decode_context) if work.chunks else 0.0,
    ]


_CONTEXT = -2  # of the decodes, among the figures
NUM_FIGURES = len(figures_of(StepWork(0, 0, ()), ExecutorCaps()))
