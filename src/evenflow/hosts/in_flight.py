"""A host engine's steps between scheduling and output: their shapes, and which time is their own."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from evenflow.core.plan import ChunkReason, StepShape


@dataclass(slots=True)
class InFlightStep:
    planned_at: float = 0.0
    decode_ids: set[str] = field(default_factory=set)
    reasons: dict[str, ChunkReason] = field(default_factory=dict)  # why each chunk is not longer, by request
    key: object = None  # the host's object for this step
    shape: StepShape | None = None  # None: it holds no tokens
    chunks: list[tuple[str, int, int]] = field(default_factory=list)  # request, start, length
    predicted: float = 0.0
    seconds: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    is_own_time: bool = True  # False: its seconds may include part of another step's

    @property
    def is_launched(self) -> bool:
        return self.shape is not None and self.shape.is_launched


class InFlightSteps:
    """Steps that the host has scheduled and not finished yet, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[InFlightStep] = deque()
        self._last = InFlightStep()  # the last one to end

    @property
    def num_steps(self) -> int:
        """How many of them hold tokens."""
        return sum(1 for step in self._steps if step.shape is not None)

    def add(self, step: InFlightStep) -> None:
        self._steps.append(step)

    def end(self, key: object, now: float) -> InFlightStep:
        """The step of this key has ended; the time since it began, or since the previous one ended, is its own."""
        step = self._steps.popleft()
        while step.key is not key:
            step = self._steps.popleft()
        self._set_time(step, now)
        self._last = step
        return step

    def _set_time(self, step: InFlightStep, now: float) -> None:
        """The host sees a step's end only after launching the next one, op by op if no graph has that many rows.

        In a row of launched steps, one such delay stands for another; otherwise it has to be subtracted.
        """
        last, following = self._last, self._steps[0] if self._steps else None
        next_is_launched = following is not None and following.is_launched
        step.began_at, step.ended_at = max(step.planned_at, last.ended_at), now
        step.seconds = now - step.began_at
        if not step.is_launched:
            step.is_own_time = not next_is_launched
        elif last.is_launched or next_is_launched:
            step.is_own_time = last.is_launched and next_is_launched
        elif last.ended_at > step.planned_at:
            launching = last.ended_at - step.planned_at
            step.seconds = max(launching, now - max(step.planned_at, last.began_at + last.predicted))
