"""A host engine's steps between scheduling and output: their shapes, and which time belongs to which step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from evenflow.core.plan import ChunkReason, StepShape
from evenflow.core.report import AdmissionReport

_LAUNCH_OF_SAMPLING = 0.0025  # seconds, at most, after the forward pass is launched
_MAX_STEPS = 4  # of an observation: by then, an end seen late matters little


@dataclass(slots=True)
class InFlightStep:
    planned_at: float = 0.0
    decode_ids: set[str] = field(default_factory=set)
    reasons: dict[str, ChunkReason] = field(default_factory=dict)  # why each chunk is not longer, by request
    key: object = None  # the host's object for this step
    shape: StepShape | None = None  # None: it holds no tokens
    chunks: list[tuple[str, int, int]] = field(default_factory=list)  # request, start, length
    admissions: list[AdmissionReport] = field(default_factory=list)  # of requests that it starts
    predicted: float = 0.0
    seconds: float = 0.0
    launched_at: float = 0.0  # the host had launched it
    launch_seconds: float = 0.0  # that the output of another step had to wait for
    began_at: float = 0.0
    ended_at: float = 0.0
    is_own_time: bool = True  # False: its seconds may include part of another step's


class Observation(NamedTuple):
    """Steps whose seconds are known together, though maybe not apart."""

    shapes: tuple[StepShape, ...]
    seconds: float
    launches: tuple[float, ...]  # seconds of each step's launch, 0 if unknown


class InFlightSteps:
    """Steps that the host has scheduled and not finished yet, oldest first.

    The host launches a step before it looks for the output of the one before, which may have ended long ago: launching
    takes up to 30 ms. If it then waits for that output, it sees the end as it happens; otherwise the steps on both
    sides of this end are known only together.
    """

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._last_end = 0.0  # as seen
        self._open: list[InFlightStep] = []  # ended since an end was seen as it happened
        self.observation: Observation | None = None  # that the last end completed

    @property
    def num_steps(self) -> int:
        """How many of them hold tokens."""
        return sum(1 for step in self._steps if step.shape is not None)

    def add(self, step: InFlightStep) -> None:
        self._steps.append(step)

    def launched(self, key: object, now: float) -> InFlightStep | None:
        """The host has launched the step with this key. Returns it if another step's output had to wait for that."""
        step = next((step for step in reversed(self._steps) if step.key is key), None)
        if step is None:
            return None
        step.launched_at = now
        if step is self._steps[0] or self._last_end > step.planned_at:
            return None
        step.launch_seconds = now - step.planned_at
        return step

    def end(self, key: object, now: float, device_seconds: float | None = None) -> InFlightStep:
        """The step of this key has ended; the time since it began, or since the previous one ended, is its own.

        `device_seconds`: the same by the device's clock, which knows better; after an idle time it counts that too.
        """
        if all(step.key is not key for step in self._steps):
            raise LookupError("this step was not followed")
        step = self._steps.popleft()
        while step.key is not key:
            step = self._steps.popleft()
        step.began_at, step.ended_at = max(step.planned_at, self._last_end), now
        step.seconds = now - step.began_at
        self._last_end = now
        has_waited = not self._steps or now - self._steps[0].launched_at > _LAUNCH_OF_SAMPLING
        if device_seconds is not None:
            step.seconds, has_waited = min(device_seconds, now - step.planned_at), True
            step.began_at, self._open = now - step.seconds, []
        step.is_own_time = has_waited and not self._open
        if step.shape is not None:
            self._open.append(step)
        is_complete = self._open and (has_waited or len(self._open) == _MAX_STEPS)
        self.observation = self._observed(now) if is_complete else None
        return step

    def _observed(self, now: float) -> Observation:
        shapes = tuple(step.shape for step in self._open if step.shape is not None)
        seconds = now - self._open[0].began_at
        launches = tuple(step.launch_seconds for step in self._open)
        self._open = []
        return Observation(shapes, seconds, launches)
