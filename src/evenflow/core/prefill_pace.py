"""How much longer prompts take in a busy engine than alone: decodes share their steps, and steps have overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from evenflow.core.plan import Chunk

_KEPT = 0.95  # of what earlier steps count, with each step


class PrefillPace:
    """The ratio of the seconds of recent steps with chunks to those of the chunks by themselves."""

    def __init__(self, price_of: Callable[[int, int], float]) -> None:
        self._price_of = price_of  # seconds of a chunk of this start and length, by itself
        self._taken = 0.0
        self._alone = 0.0

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A step with these chunks took this many seconds."""
        self._taken = _KEPT * self._taken + seconds
        self._alone = _KEPT * self._alone + sum(self._until(chunk.end) - self._until(chunk.start) for chunk in chunks)

    def _until(self, position: int) -> float:
        return self._price_of(0, position) if position else 0.0

    def seconds(self, alone: float) -> float:
        """How long prompts take that would take `alone` seconds by themselves."""
        return alone * self._taken / self._alone if self._alone > 0 else alone
