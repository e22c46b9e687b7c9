"""What the recording adds to one of vLLM's schedulers: budgets that vary at random, and notes on every step.

Nothing here imports vLLM or torch: `vllm_recording` binds it to them.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from step_recording import Chunk, Step

FIXED_BUDGETS = (512, 1024, 2048)
SMALLEST_BUDGET = 64
MIN_PREFILL_ROWS = 16  # left for prefill beside the decodes, whatever the budget
_FIXED_SHARE = 0.15  # of the changes


class RandomBudget:
    """A step's token budget: a log-uniform one for a few steps, now and then a common fixed one for many."""

    def __init__(self, seed: int, largest: int) -> None:
        self._rng = random.Random(seed)
        self._largest = largest
        self._budget = largest
        self._num_steps = 0

    def next(self, num_decodes: int, has_prefill: bool) -> int:
        """The next step's. Steps without prefill do not count: a budget makes no difference to them."""
        if has_prefill:
            if not self._num_steps:
                self._change()
            self._num_steps -= 1
        return min(self._largest, max(self._budget, num_decodes + MIN_PREFILL_ROWS))

    def _change(self) -> None:
        if self._rng.random() < _FIXED_SHARE:
            self._budget, self._num_steps = self._rng.choice(FIXED_BUDGETS), self._rng.randint(30, 150)
        else:
            exponent = self._rng.uniform(math.log(SMALLEST_BUDGET), math.log(self._largest))
            self._budget, self._num_steps = round(math.exp(exponent)), self._rng.randint(1, 8)


@dataclass(slots=True)
class LoggedStep:
    step: Step
    output: Any  # what schedule() returned: the engine passes this very object on
    events: list[Any] = field(default_factory=list)  # the GPU's, in the order of `Step.gpu_*`

    def set_gpu_times(self, times_us: Sequence[int]) -> None:
        """A step that failed has fewer than three, and keeps none."""
        if len(times_us) == 3:
            self.step.gpu_begin_us, self.step.gpu_forward_us, self.step.gpu_end_us = times_us


class StepLog:
    """The steps of the load that runs, in the order in which they were scheduled."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.largest_budget = 8192
        self.capture_sizes: list[int] = []
        self.requests: Sized = ()  # the scheduler's
        self.steps: list[LoggedStep] = []
        self.num_preempted = 0
        self._in_flight: deque[LoggedStep] = deque()
        self._began_at = 0.0
        self._budget: RandomBudget | None = None

    def begin_load(self, seed: int) -> None:
        self.steps, self.num_preempted = [], 0
        self._began_at = self.clock()
        self._budget = RandomBudget(seed, self.largest_budget)

    @property
    def is_idle(self) -> bool:
        return not self._in_flight and not len(self.requests)

    def now_us(self) -> int:
        return round(1e6 * (self.clock() - self._began_at))

    def next_budget(self, num_decodes: int, has_prefill: bool) -> int:
        return self._budget.next(num_decodes, has_prefill) if self._budget is not None else self.largest_budget

    def scheduled(
        self, began_us: int, budget: int, decode_ids: set[str], output: Any, requests: Mapping[str, Any]
    ) -> None:
        """Note the step that vLLM made. By now each request's computed tokens include this step's."""
        self.num_preempted += len(output.preempted_req_ids or ())
        if not output.total_num_scheduled_tokens:
            return
        step = Step(began_us, self.now_us(), num_in_flight=len(self._in_flight), budget=budget)
        for request_id, length in output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens
            if request_id in decode_ids:
                step.num_decodes += length
                step.decode_context += length * end
                step.longest_decode_context = max(step.longest_decode_context, end)
            else:
                step.chunks.append(Chunk(end - length, length, not request.is_prefill_chunk))
        self.steps.append(LoggedStep(step, output))
        self._in_flight.append(self.steps[-1])

    def launching(self, output: Any) -> LoggedStep | None:
        """The step that the engine launches with this output; None for a warm-up or a step without tokens."""
        logged = self._in_flight[-1] if self._in_flight else None
        return logged if logged is not None and logged.output is output else None

    def seen(self, output: Any) -> None:
        """The step's output reached the scheduler."""
        if self._in_flight and self._in_flight[0].output is output:
            logged = self._in_flight.popleft()
            logged.step.seen_us = self.now_us()
            logged.output = None


def recording(base: type[Any], log: StepLog) -> type[Any]:
    """A subclass of one of vLLM's schedulers that keeps this log. Decodes come first, as under a latency target."""

    class Recording(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            log.largest_budget = self.max_num_scheduled_tokens
            log.requests = self.requests
            log.capture_sizes = sorted(self.vllm_config.compilation_config.cudagraph_capture_sizes or ())

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            began_us = log.now_us()
            decodes = [request for request in self.running if not request.is_prefill_chunk]
            prefills = [request for request in self.running if request.is_prefill_chunk]
            self.running[:] = decodes + prefills
            has_prefill = bool(prefills or self.waiting)
            budget = self.max_num_scheduled_tokens = log.next_budget(len(decodes), has_prefill)
            output = super().schedule(*args, **kwargs)
            log.scheduled(began_us, budget, {request.request_id for request in decodes}, output, self.requests)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
            log.seen(scheduler_output)
            return super().update_from_output(scheduler_output, model_runner_output)

    return Recording
