"""vLLM's steps between its schedule() and its update_from_output(): their shapes, and the time that is their own.

Must not know: budgets, deadlines, who is told of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.step_time import StepTimeModel


@dataclass(slots=True)
class Step:
    """A step between the two."""

    planned_at: float
    decode_ids: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)  # why each chunk is not longer, by request
    output: Any = None
    shape: StepShape | None = None  # None: it holds no tokens
    chunks: list[tuple[str, int, int]] = field(default_factory=list)  # request, start, length
    predicted: float = 0.0
    seconds: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    is_own_time: bool = True  # its seconds hold nothing of another step's

    @property
    def is_launched(self) -> bool:
        return self.shape is not None and self.shape.is_launched


class Flight:
    """The steps that vLLM has scheduled and not ended yet, oldest first."""

    def __init__(self, caps: ExecutorCaps, step_time: StepTimeModel) -> None:
        self._caps = caps
        self._step_time = step_time
        self._steps: deque[Step] = deque()
        self._last = Step(0.0)  # the one that ended last

    @property
    def num_steps(self) -> int:
        """How many of them hold tokens."""
        return sum(1 for step in self._steps if step.shape is not None)

    def add(self, step: Step, output: Any, requests: Mapping[str, Any]) -> None:
        """vLLM made this of the step."""
        step.output = output
        self._steps.append(step)
        if not output.total_num_scheduled_tokens:
            return
        num_rows = context = num_ended = 0
        for request_id, length in output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens  # with this step's tokens
            if request_id in step.decode_ids:
                num_rows += length
                context += length * end
            else:
                step.chunks.append((request_id, end - length, length))
                num_ended += not request.is_prefill_chunk
        step.shape = self._caps.step_shape(
            num_decodes=num_rows,
            decode_context=context,
            chunks=[(start, length) for _, start, length in step.chunks],
            prefill_logit_rows=num_ended,
        )
        step.predicted = self._step_time.predict(step.shape)

    def end(self, output: Any, now: float) -> Step:
        """The step that gave this output is through: the time since it began or the one before ended is its own."""
        step = self._steps.popleft()
        while step.output is not output:
            step = self._steps.popleft()
        self._time(step, now)
        self._last = step
        return step

    def _time(self, step: Step, now: float) -> None:
        """A step's own time. vLLM sees the end of a step only once it has launched the next, op by op where no graph
        has so many rows. In a row of launched steps one such delay stands for another; else it must be told apart."""
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
