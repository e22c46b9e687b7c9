"""Measures a few steps of a small load at start-up, so that the first real steps are sized by data."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from evenflow.core.plan import Decodes, StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from evenflow.executors.base import Executor

_NUM_STREAMS = 4
_STREAM_TOKENS = 24
_SMALLEST_CHUNK, LARGEST_CHUNK = 16, 512
_FEW_CHUNKS = ((128,), (16,) * 4)  # the model's speed is the median of four steps
_DECODES_BETWEEN = 2
MAX_SECONDS = 8.0
_MAX_CHECK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Runs steps of an idle executor."""

    executor: Executor
    num_blocks: int
    block_size: int
    vocab_size: int
    max_position: int
    prior: StepCosts | None = None  # expected costs
    largest_chunk: int = LARGEST_CHUNK

    def warm_up(self) -> None:
        """Run a step of every size: kernels are compiled, or chosen by libraries, at first use."""
        self._run(StepTimeModel(), (self._sizes,) * 2, 0, math.inf)

    def measure(self) -> StepTimeModel:
        """Run steps of many shapes, for at most about MAX_SECONDS."""
        # During the streams' first steps, then beside their decodes.
        chunks = (self._sizes * 2,) * 2
        return self._as_stored(self._run(StepTimeModel(self.prior), chunks, _DECODES_BETWEEN, MAX_SECONDS))

    def check(self, known: StepTimeModel) -> StepTimeModel:
        """Adjust known costs to the machine's current speed, by a few steps: under a second on an idle machine."""
        return self._run(self._as_stored(known), _FEW_CHUNKS, 0, _MAX_CHECK_SECONDS)

    @property
    def _sizes(self) -> list[int]:
        count = (self.largest_chunk // _SMALLEST_CHUNK).bit_length()
        return [_SMALLEST_CHUNK << doubling for doubling in range(count)]

    def _as_stored(self, model: StepTimeModel) -> StepTimeModel:
        """A round trip through its record: a start from stored step times has exactly this state."""
        return StepTimeModel.from_record(model.to_record(), self.prior)

    def _run(
        self, model: StepTimeModel, chunks: Sequence[Sequence[int]], decodes_between: int, max_seconds: float
    ) -> StepTimeModel:
        """Run chunks of these sizes. Skips one that would exceed the remaining time, judged by the one before."""
        config = SchedulerConfig(num_blocks=self.num_blocks, block_size=self.block_size, enable_prefix_caching=False)
        scheduler = Scheduler(config, self.executor.caps, step_time=model)
        end = time.perf_counter() + max_seconds
        max_model_len = min(self.max_position, self.num_blocks * self.block_size)
        total = min(sum(chunks[-1]), max_model_len - 2, (self.num_blocks // 2) * self.block_size)
        num_added = 0
        taken: set[int] = set()  # executor slots
        for lengths, sizes in zip((_NUM_STREAMS * [_STREAM_TOKENS], [total]), chunks, strict=True):
            for length in lengths:
                tokens = [(7919 * num_added + 31 * position) % self.vocab_size for position in range(length)]
                sampling = SamplingParams(max_tokens=min(400, max_model_len - length), temperature=0.0, ignore_eos=True)
                scheduler.add(Request(f"warm-up-{num_added}", tokens, sampling, seed=0, max_model_len=max_model_len))
                num_added += 1
            for chunk in sizes:
                budgets = [chunk + _NUM_STREAMS] + [1] * decodes_between
                longest = max([self._step(scheduler, budget, taken) for budget in budgets])
                is_late = time.perf_counter() + 2.5 * longest > end
                if is_late or all(request.num_output_tokens for request in scheduler.requests.values()):
                    break
        while scheduler.num_in_flight:
            self._commit(scheduler)
        self.executor.submit(StepPlan(0, tuple(taken), (), (), Decodes(), (), 0))
        self.executor.wait()
        return scheduler.step_time

    def _step(self, scheduler: Scheduler, budget: int, taken: set[int]) -> float:
        """Submit one step, behind others if the executor takes several; returns the seconds of a finished one, or 0.

        On an idle GPU, a step would seem to take as long as its launch.
        """
        scheduler.set_policy(PolicySpec("fixed", budget))
        plan = scheduler.schedule(time.perf_counter())
        if plan is not None:
            taken.difference_update(plan.released_slots)
            taken.update(admission.slot for admission in plan.admissions)
            self.executor.submit(plan)
        is_full = plan is None or not scheduler.can_schedule
        return self._commit(scheduler) if is_full and scheduler.num_in_flight else 0.0

    def _commit(self, scheduler: Scheduler) -> float:
        result = self.executor.wait()
        scheduler.commit(result, time.perf_counter())
        return result.seconds
