"""Times a step on its device: with events on a GPU, which runs behind the host, else with the clock."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Starts when created. A step queued behind another starts when that one ends."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._seconds, self._began = 0.0, time.perf_counter()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        """Call this once the whole step has been launched."""
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    def wait(self) -> None:
        """Wait until the device has finished the step."""
        if self._events:
            self._events[1].synchronize()

    @property
    def seconds(self) -> float:
        """Valid after `wait`."""
        if not self._events:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
