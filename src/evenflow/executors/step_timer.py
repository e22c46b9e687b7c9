"""When a step began and ended on its device: by events on a GPU, which runs behind the host, else by the clock."""

from __future__ import annotations

import time

import torch


class StepTimer:
    """Starts when created. A step behind another one starts when that one ends."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        self._seconds, self._began = 0.0, time.perf_counter()
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def stop(self) -> None:
        """Call this when all of the step has been launched."""
        self._seconds = time.perf_counter() - self._began
        if self._events:
            self._events[1].record()

    def wait(self) -> None:
        """Wait until the device has ended the step."""
        if self._events:
            self._events[1].synchronize()

    @property
    def seconds(self) -> float:
        """Valid after `wait`."""
        if not self._events:
            return self._seconds
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
