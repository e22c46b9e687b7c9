"""Whether a latency target can be kept, and the lowest one that can. Both change on evidence only, not with noise."""

from __future__ import annotations

import math
from collections import deque
from itertools import islice
from statistics import median

_STEPS_TO_JUDGE = 16  # in a row, before a target is called infeasible, or feasible again
WINDOW = 64  # steps that the advised target covers: the log says so after as many


class Feasibility:
    """Judges the target step by step, by the least time that steps with prefill need."""

    def __init__(self) -> None:
        self.advised: float | None = None  # the lowest feasible target, while the actual one is infeasible
        self._needed: deque[float] = deque(maxlen=WINDOW)

    def judge(self, needed: float, target: float) -> None:
        """Take in a step: `needed` is its seconds between tokens with the least prefill beside the current decodes."""
        self._needed.append(needed)
        last = list(islice(reversed(self._needed), _STEPS_TO_JUDGE))
        if len(last) < _STEPS_TO_JUDGE:
            return
        if max(last) <= target:
            self.advised = None
        elif self.advised is not None or min(last) > target:
            self.advised = round_up(max(*self._needed, target))

    @property
    def estimate(self) -> tuple[float, float]:
        """The lowest feasible target: what half of the recent steps need, and what all of them do."""
        enough = round_up(max(self._needed)) if self.advised is None else self.advised
        return min(round_up(median(self._needed)), enough), enough


def round_up(seconds: float) -> float:
    """To two digits: 0.134 becomes 0.14."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(round(seconds / unit, 6)) * unit, 12)
