"""Tells a slow step from a hung one, by the step's predicted time instead of a fixed timeout.

The engine publishes when its current step must have ended; another thread or process checks that. A hung thread
cannot be killed, so the server runs the engine in a process, which is killed and replaced.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_CHECK_S = 0.5
# A step may take this many times the seconds that such steps rarely exceed.
_SLOWEST = 20.0
_FIRST_STEP_S = 600.0  # while nothing is known: kernels may be compiled in it


class Cell(Protocol):
    """A number that two threads or processes share: from ctypes or `multiprocessing`."""

    value: Any


class Pulse:
    """When the engine's current step counts as hung; never, while it waits for requests."""

    def __init__(self, step_timeout_s: float = 60.0) -> None:
        self._step_timeout_s = step_timeout_s
        self._until: Cell = ctypes.c_double(math.inf)

    def share(self, cell: Cell) -> None:
        """Publish it in this cell, which another process made."""
        self._until = cell

    @contextmanager
    def beat(self, clock: Callable[[], float]) -> Iterator[None]:
        """Encloses one step."""
        self._until.value = clock() + self._step_timeout_s
        try:
            yield
        finally:
            self._until.value = math.inf

    def extend(self, upper_s: float) -> None:
        """The step waits for work that rarely takes longer than this; 0: nothing is known."""
        self._until.value += _SLOWEST * upper_s if upper_s else _FIRST_STEP_S

    def is_overdue(self, now: float) -> bool:
        return is_overdue(self._until, now)


def is_overdue(cell: Cell, now: float) -> bool:
    return bool(cell.value < now)


class Watchdog:
    """Looks at a pulse from a thread of its own, and calls `on_hang` once if a step hangs."""

    def __init__(
        self, pulse: Pulse, on_hang: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._pulse = pulse
        self._on_hang = on_hang
        self._clock = clock
        self._is_closed = threading.Event()
        threading.Thread(target=self._run, name="evenflow-watchdog", daemon=True).start()

    def _run(self) -> None:
        while not self._is_closed.wait(_CHECK_S):
            if self._pulse.is_overdue(self._clock()):
                self._on_hang()
                return

    def close(self) -> None:
        self._is_closed.set()
