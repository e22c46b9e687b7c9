"""How much longer prompts take in a busy engine than alone: streams share their steps, and steps have overhead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from evenflow.core.plan import Chunk

_KEPT = 0.95  # of what earlier steps count, with each step


class PrefillPace:
    """The ratio of the seconds of recent steps with chunks to those of the chunks by themselves.

    Where fewer streams run now than ran beside those chunks, prompts take less long: the measured ratio is an upper
    bound, and with no stream at all it is 1.
    """

    def __init__(self, price_of: Callable[[int, int], float]) -> None:
        self._price_of = price_of  # seconds of a chunk of this start and length, by itself
        self._taken = 0.0
        self._alone = 0.0
        self._streams = 0.0
        self._num_steps = 0.0
        self._last_step = 0

    def observe(self, step_id: int, chunks: Sequence[Chunk], seconds: float, streams: float) -> None:
        """A step with these chunks took this many seconds, of which its streams add `streams` to a full step."""
        kept = _KEPT ** (step_id - self._last_step)
        self._last_step = step_id
        self._taken = kept * self._taken + seconds
        self._alone = kept * self._alone + sum(self._until(chunk.end) - self._until(chunk.start) for chunk in chunks)
        self._streams = kept * self._streams + streams
        self._num_steps = kept * self._num_steps + 1

    def _until(self, position: int) -> float:
        return self._price_of(0, position) if position else 0.0

    def seconds(self, alone: float, streams: float = math.inf) -> float:
        """How long prompts take beside these streams that would take `alone` seconds by themselves."""
        if not self._alone > 0:
            return alone
        before = self._streams / self._num_steps
        still_there = min(1.0, streams / before) if before else 1.0
        return alone * (1 + (self._taken / self._alone - 1) * still_there)
