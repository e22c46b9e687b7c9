"""Virtual time: events in order, each of which returns the events that follow from it.

It knows nothing about requests and engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

Event = Callable[[float], "Iterable[Timed]"]  # called with its time; returns what follows
Timed = tuple[float, Event]


class Loop:
    """Runs events by time; those of one time in the order in which they were added.

    `until` ends a run: what was begun before it still happens, such as the end of a step, but nothing follows from it.
    """

    def __init__(self, events: Iterable[Timed] = (), until: float = math.inf) -> None:
        self.until = until
        self._queue: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self.add(events)

    def add(self, events: Iterable[Timed]) -> None:
        for at, event in events:
            heappush(self._queue, (at, next(self._numbers), event))

    @property
    def next_at(self) -> float:
        """When the next event happens."""
        return self._queue[0][0] if self._queue else math.inf

    def run(self, by: float = math.inf) -> None:
        """All events up to this time."""
        while self._queue and self._queue[0][0] <= by:
            now, _, event = heappop(self._queue)
            later = event(now)
            if now < self.until:
                self.add(later)
