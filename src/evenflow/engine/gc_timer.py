"""Seconds spent in Python's garbage collector, which stops every thread and so every stream."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any


class GcTimer:
    """Counts while it is referenced."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0
        timer = weakref.ref(self)

        def on_collection(phase: str, info: dict[str, Any]) -> None:
            if (alive := timer()) is not None:
                alive._on_collection(phase)

        gc.callbacks.append(on_collection)
        weakref.finalize(self, gc.callbacks.remove, on_collection)

    def _on_collection(self, phase: str) -> None:
        if phase == "start":
            self._started = self._clock()
        else:
            self.seconds += self._clock() - self._started
