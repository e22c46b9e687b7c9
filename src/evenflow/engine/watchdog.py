"""Tells a slow step from a hung one, by the step's predicted time instead of a fixed timeout.

The engine publishes a time by which its current step must end; another thread or process checks it. A hung thread
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
# A step may take this many times the upper bound of its predicted time.
_SLOWEST = 20.0
_FIRST_STEP_S = 600.0  # the first step may compile kernels


class Cell(Protocol):
    """A number that two threads or processes share: from ctypes or `multiprocessing`."""

    value: Any


class Pulse:
    """The time at which the current step counts as hung; never while the engine is idle."""

    def __init__(self, step_timeout_s: float = 60.0) -> None:
        self._step_timeout_s = step_timeout_s
        self._until: Cell = ctypes.c_double(math.inf)

    def share(self, cell: Cell) -> None:
        """Publish through this cell, made by another process."""
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
        """Allow for work with this upper bound in seconds; 0: unknown."""
        self._until.value += _SLOWEST * upper_s if upper_s else _FIRST_STEP_S

    def is_overdue(self, now: float) -> bool:
        return is_overdue(self._until, now)


def is_overdue(cell: Cell, now: float) -> bool:
    return bool(cell.value < now)


class Watchdog:
    """Checks a pulse on its own thread, and calls `on_hang` once if a step hangs."""

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
