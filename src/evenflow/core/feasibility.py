"""Whether a latency target can be kept, and the lowest one that can. Both change on evidence only, not with noise."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

_STEPS_TO_JUDGE = 16  # in a row, before a target is called infeasible, or feasible again
_WINDOW = 256  # steps that the advice rests on
_SHARE = 0.98  # of them, that the advised target covers
_WORTH_LOWERING = 0.8  # lower the advice only if so little of it is needed


class Feasibility:
    """Judges the target step by step, by the least time that steps with prefill need."""

    def __init__(self) -> None:
        self.advised: float | None = None  # the lowest feasible target, while the actual one is infeasible
        self._needed: deque[float] = deque(maxlen=_WINDOW)
        self._num_advised = 0  # steps since advice was first given
        self._num_contrary = 0  # steps in a row that contradict the verdict

    def judge(self, needed: float, target: float) -> None:
        """Take in a step: `needed` is its seconds between tokens with the least prefill beside the current decodes."""
        self._needed.append(needed)
        is_infeasible = self.advised is not None
        self._num_contrary = self._num_contrary + 1 if (needed > target) != is_infeasible else 0
        if self._num_contrary >= _STEPS_TO_JUDGE:
            self._num_contrary = self._num_advised = 0
            self.advised = None if is_infeasible else round_up(max(self._enough(), target))
        elif self.advised is not None:
            self._update(self.advised)

    def _update(self, advised: float) -> None:
        """Raise it when more is needed, lower it when far less is.

        Once it is lowered to what is needed: the first advice rests on few steps, of a model that knew little.
        """
        self._num_advised += 1
        enough, is_first_check = self._enough(), self._num_advised == 2 * _WINDOW
        lowest = advised if is_first_check else _WORTH_LOWERING * advised
        if enough > advised or (len(self._needed) == _WINDOW and enough < lowest):
            self.advised = round_up(enough)

    @property
    def estimate(self) -> tuple[float, float]:
        """The lowest feasible target: what half of the recent steps need, and what nearly all of them do."""
        enough = self.advised if self.advised is not None else round_up(self._enough())
        return min(round_up(median(self._needed)), enough), enough

    def _enough(self) -> float:
        return sorted(self._needed)[math.ceil(_SHARE * len(self._needed)) - 1]


def round_up(seconds: float) -> float:
    """To two digits: 0.134 becomes 0.14."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return round(math.ceil(round(seconds / unit, 6)) * unit, 12)
