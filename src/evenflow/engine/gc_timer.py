"""Seconds that Python's garbage collector took: it stops every thread, and so every stream.

Must not know: engines, steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any


class GcTimer:
    """Counts for as long as somebody holds it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0
        timer = weakref.ref(self)

        def notice(phase: str, info: dict[str, Any]) -> None:
            if (alive := timer()) is not None:
                alive._notice(phase)

        gc.callbacks.append(notice)
        weakref.finalize(self, gc.callbacks.remove, notice)

    def _notice(self, phase: str) -> None:
        if phase == "start":
            self._started = self._clock()
        else:
            self.seconds += self._clock() - self._started
