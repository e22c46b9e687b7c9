"""Progress and time-left estimates of a benchmark."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

_MIN_SHARE = 0.1  # of the first turn; what it took so far says little before


class TimeLeft:
    """What the turns to come take: as forecast, corrected by what was done so far."""

    def __init__(self, forecast: Sequence[float], clock: Callable[[], float] = time.perf_counter) -> None:
        """`forecast` has the seconds of each turn."""
        self._forecast = forecast
        self._clock = clock
        self._began = clock()

    def text(self, num_turns: int, share: float = 0.0) -> str:
        """For a user, after these turns and a share of the next one."""
        done, total = self._done(num_turns, share), sum(self._forecast)
        return f"{done / total if total else 0:.0%} done, about {self.after(num_turns, share):.0f} s left"

    def after(self, num_turns: int, share: float = 0.0) -> float:
        done = self._done(num_turns, share)
        left = sum(self._forecast) - done
        if not num_turns and share < _MIN_SHARE:
            return left
        return left * (self._clock() - self._began) / done if done else left

    def _done(self, num_turns: int, share: float) -> float:
        return sum(self._forecast[:num_turns]) + share * sum(self._forecast[num_turns : num_turns + 1])
