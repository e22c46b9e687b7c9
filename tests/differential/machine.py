"""The engine of a configuration, on the real executors but in virtual time: it does the same each time.

What depends on real time in an engine is set here: how long steps and moves of KV blocks take, and when those are done.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from evenflow import LLM
from evenflow.core.plan import NO_TIER_RESULT, ExecutorCaps, StepPlan, StepResult, TierResult
from evenflow.core.scheduler import Scheduler
from evenflow.executors.base import Executor
from evenflow.executors.fake import VirtualClock
from evenflow.executors.faulty import FaultyExecutor
from evenflow.executors.kv_tier import KvTier, TieredExecutor
from tests.differential.configurations import MODELS, Configuration, kv_bytes_per_token
from tests.engine.paged import paged_llm

Tamper = Callable[[StepResult], StepResult]


def as_it_is(result: StepResult) -> StepResult:
    return result


class Machine:
    """An executor whose steps take what a cost says. Implements `Executor`; `tamper` spoils results, to test tests."""

    def __init__(
        self, executor: Executor, configuration: Configuration, scheduler: Scheduler, events: Counter[str], phase: int
    ) -> None:
        self.clock = VirtualClock()
        self.touched: deque[set[int]] = deque()  # blocks of each step in flight
        self.tamper: Tamper = as_it_is
        self.faulty = FaultyExecutor(executor, configuration.faults if phase == 0 else ())
        self._tier = executor._tier if isinstance(executor, TieredExecutor) else None
        self._configuration, self._scheduler, self._events = configuration, scheduler, events
        self._random = configuration.random(f"costs {phase}")
        self._in_flight: deque[StepPlan] = deque()
        self._unreported: deque[TierResult] = deque()  # moves, of which the engine is told later

    @property
    def caps(self) -> ExecutorCaps:
        return self.faulty.caps

    def submit(self, plan: StepPlan) -> None:
        names = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]
        self.touched.append({block for name in names for block in self._scheduler.requests[name].block_ids})
        self._count(plan)
        if plan.most_seconds is not None:  # leave out all that may be left out, or nothing
            sheds = self._configuration.sheds and self._random.random() < 0.5
            plan = replace(plan, most_seconds=-1.0 if sheds else math.inf)
        self._in_flight.append(plan)
        self.faulty.submit(plan)
        if self._tier is not None:
            _finish_moves(self._tier)

    def wait(self) -> StepResult:
        plan = self._in_flight.popleft()
        self.touched.popleft()
        seconds = self._seconds(plan)
        self.clock.now += seconds + 0.0001
        result = replace(self.faulty.wait(), seconds=seconds)
        self._events["shed"] += bool(result.shed)
        if self._tier is not None:
            result = replace(result, tier=self._late(result.tier, has_rows=bool(plan.num_sequences)))
        return self.tamper(result)

    def close(self) -> None:
        self._events["faults"] += self.faulty.num_raised
        self.faulty.close()

    def _seconds(self, plan: StepPlan) -> float:
        shape = plan.shape(self.caps)
        cost = 0.002 + 0.0003 * shape.total_rows + 0.00001 * shape.decode_context + 0.000005 * shape.prefill_attention
        return cost * self._random.choice((1.0, 1.0, 1.0, 1.1, 0.9, 1.5, 6.0 if self._random.random() < 0.1 else 1.0))

    def _late(self, done: TierResult, has_rows: bool) -> TierResult:
        """What the engine is told of moves. It may wait for one with a step without rows, which must end."""
        self._events["restored blocks"] += len(done.restored)
        self._events["saved blocks"] += done.num_saved
        seconds = self._configuration.move_seconds
        self._unreported.append(done._replace(save_seconds=seconds, restore_seconds=seconds))
        told = NO_TIER_RESULT
        while self._unreported and (len(self._unreported) > self._configuration.move_steps or not has_rows):
            told = told.then(self._unreported.popleft())
        return told

    def _count(self, plan: StepPlan) -> None:
        self._events["steps"] += 1
        self._events["preempted"] += sum(one.epoch > 0 for one in plan.admissions)
        self._events["cached tokens"] += sum(one.num_cached_tokens for one in plan.admissions)
        self._events["mixed steps"] += bool(plan.chunks and len(plan.decodes))


def _finish_moves(tier: KvTier) -> None:
    for worker in (tier._saver, tier._restorer):
        worker.submit(lambda: None).result()


def start(
    configuration: Configuration, model: Path, cache_dir: Path, events: Counter[str], phase: int
) -> tuple[LLM, Machine]:
    settings = dict(configuration.settings)
    kv_heads = MODELS[configuration.model][1].get("num_key_value_heads", 2)
    memory = configuration.num_blocks * settings["block_size"] * kv_bytes_per_token(kv_heads)
    # The CPU's executor stores a cached prefix besides the running copy.
    copies = 1 if configuration.is_paged or not settings["enable_prefix_caching"] else 2
    settings["kv_cache_memory"] = copies * memory
    if configuration.has_disk:
        settings["cache_dir"] = str(cache_dir)
    # A target from the start on would make the engine measure real steps.
    policy = "fixed:64" if configuration.policy.startswith("target") else configuration.policy
    new_llm = paged_llm if configuration.is_paged else partial(LLM, device="cpu")
    llm = new_llm(model, policy=policy, **settings)
    engine = llm.engine
    machine = Machine(engine.executor, configuration, engine.scheduler, events, phase)
    engine.executor, engine.clock, llm._intake.clock = machine, machine.clock, machine.clock
    if (tier := engine.scheduler.tier) is not None:
        tier.save_time.seconds = tier.restore_time.seconds = configuration.move_seconds
    if policy != configuration.policy:
        llm.set_policy(configuration.policy)
    return llm, machine
