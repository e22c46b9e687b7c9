"""A state machine that adds, aborts, schedules, commits, fails and finishes at random, with the scheduler's promises
checked after every rule. The fake executor's tokens depend on every cell of KV read, so a misused block shows in the
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, Shed, StepPlan, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.request import FinishReason, Request, Status
from evenflow.core.tier import TierConfig
from tests.core.driving import Driver, StepFailed, check_replay
from tests.core.promises import check_scheduler

POLICIES = (
    "fixed:1",
    "fixed:7",
    "fixed:64",
    "unchunked",
    "alternate:5",
    "alternate:32",
    "load",
    "adaptive",
    "prompt-length",
    "target:3ms",  # not even six decodes keep it
    "target:20ms",
    "target:20ms,paced",
    "target:2.5ms,paced",
)
NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS = 24, 4, 6
LONGEST = 60
ROW_SECONDS = 0.001

policies = st.builds(
    lambda text, budget: PolicySpec.parse(text).bounded(budget), st.sampled_from(POLICIES), st.sampled_from((24, 96))
)
own_targets = st.sampled_from((None, None, 0.004, 0.015, 0.2))


def names_in(plan: StepPlan) -> list[str]:
    return [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=policies,
        depth=st.sampled_from((1, 2)),
        sheds_rows=st.booleans(),
        caching=st.booleans(),
        threshold=st.sampled_from((0, 5)),
        alignment=st.sampled_from((1, 4)),
        max_prefills=st.sampled_from((1, 3, 16)),
        tier_blocks=st.sampled_from((0, 0, 3, 12, 60)),
        tier_keeps_all=st.booleans(),
    )
    def start(
        self,
        policy: PolicySpec,
        depth: int,
        sheds_rows: bool,
        caching: bool,
        threshold: int,
        alignment: int,
        max_prefills: int,
        tier_blocks: int,
        tier_keeps_all: bool,
    ) -> None:
        tier = TierConfig(
            num_blocks=tier_blocks, save_seconds=0.0, restore_seconds=ROW_SECONDS, keeps_all=tier_keeps_all
        )
        self.driver = Driver(
            str(policy),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=policy.budget,
            caps=ExecutorCaps(
                depth,
                max_prefill_sequences=max_prefills,
                chunk_alignment=alignment,
                sheds_rows=sheds_rows and depth == 1,
            ),
            cost=self.seconds_of,
            disturb=self.disturb,
            shed=lambda plan: self.shed,
            long_prefill_token_threshold=threshold,
            enable_prefix_caching=caching,
            tier=tier if tier_blocks else None,
            loses=lambda block_hash: self.tier_is_broken,
        )
        self.tier_is_broken = False
        self.scheduler = self.driver.scheduler
        self.slowness = 1.0
        self.kept: dict[str, int] = {}
        self.touched: deque[set[int]] = deque()  # blocks of each step in flight
        self.shed: dict[int, Shed] = {}  # in the oldest step in flight
        self.device_fault = ""
        self.failing_rows: set[int] = set()  # of the oldest step in flight

    def seconds_of(self, shape: StepShape) -> float:
        return self.slowness * ROW_SECONDS * shape.total_rows

    def disturb(self, plan: StepPlan) -> Mapping[int, str]:
        if self.device_fault:
            raise StepFailed(self.device_fault)
        return dict.fromkeys(self.failing_rows, "the rules leave no token")

    # ---- requests and settings change ----

    @rule(
        length=st.integers(1, LONGEST),
        max_tokens=st.integers(1, 30),
        family=st.integers(0, 2),
        tbt_target=own_targets,
        ttft_target=own_targets,
    )
    def add(
        self, length: int, max_tokens: int, family: int, tbt_target: float | None, ttft_target: float | None
    ) -> None:
        """Prompts of one family share all but their length. When memory ran out, fewer tokens fit than before."""
        capacity = self.scheduler.pool.num_blocks * BLOCK_SIZE
        length = min(length, capacity - 1)
        self.driver.add(
            [family] * length,
            max_tokens=min(max_tokens, capacity - length),
            ignore_eos=True,
            tbt_target=tbt_target,
            ttft_target=ttft_target,
        )

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.driver.abort(data.draw(st.sampled_from(sorted(self.scheduler.requests))))

    @precondition(lambda self: any(r.num_output_tokens for r in self.scheduler.requests.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """As a stop string does: the end lies behind, some output is cut."""
        names = sorted(name for name, r in self.scheduler.requests.items() if r.num_output_tokens)
        name = data.draw(st.sampled_from(names))
        keep = data.draw(st.integers(0, self.driver.requests[name].num_output_tokens))
        assert self.driver.finish(name, FinishReason.STOP, keep)
        self.kept[name] = keep

    @rule(policy=policies)
    def set_policy(self, policy: PolicySpec) -> None:
        self.driver.set_policy(policy)
        assert self.scheduler.config.policy == policy

    @rule(seconds=st.sampled_from((0.001, 0.03, 1.0)), slowness=st.sampled_from((0.5, 1.0, 4.0)))
    def time_passes(self, seconds: float, slowness: float) -> None:
        """Nothing happens for a while; then the machine is as fast as before, or not."""
        self.driver.executor.clock.now += seconds
        self.slowness = slowness

    @rule(is_broken=st.booleans())
    def break_tier(self, is_broken: bool) -> None:
        """While it is broken, nothing can be restored."""
        self.tier_is_broken = is_broken

    # ---- steps ----

    @precondition(lambda self: self.scheduler.can_schedule)
    @rule()
    def schedule(self) -> None:
        waiting = {name: r for name, r in self.scheduler.requests.items() if r.status is not Status.RUNNING}
        to_feed = {
            name: (r.num_scheduled, r.num_known + r.num_pending - r.num_scheduled)
            for name, r in self.scheduler.requests.items()
        }
        plan = self.driver.schedule()
        if plan is None:
            assert self.scheduler.num_in_flight or not self.scheduler.requests, "stuck with work left"
            return
        policy = self.scheduler.config.policy
        bound = max(policy.budget, len(plan.decodes) + FLOOR_TOKENS)
        assert plan.num_rows <= bound or (policy.name == "unchunked" and len(plan.chunks) == 1)
        assert len(plan.chunks) <= self.scheduler.caps.max_prefill_sequences
        assert all(chunk.length >= 1 for chunk in plan.chunks)
        assert self.suspects.isdisjoint(names_in(plan)) or plan.num_sequences == 1, "a suspect runs with others"
        assert {change.slot for change in plan.block_changes} <= {
            *plan.decodes.slots,
            *(chunk.slot for chunk in plan.chunks),
        }, "a step that fails would lose the change of another's table"
        slots = [*plan.decodes.slots, *(chunk.slot for chunk in plan.chunks)]
        assert len(set(slots)) == len(slots)
        assert {admission.request_id for admission in plan.admissions} <= set(waiting)
        for name, position in zip(plan.decodes.request_ids, plan.decodes.positions, strict=True):
            assert to_feed[name] == (position, 1), "a decode feeds exactly the one token that is left"
            assert name not in waiting
        self.check_new_blocks(plan)
        self.touched.append({block for name in names_in(plan) for block in self.driver.requests[name].block_ids})

    def check_new_blocks(self, plan: StepPlan) -> None:
        """No block is given away that a step in flight touches; a cached one is shared, not given away."""
        num_cached = {one.slot: one.num_cached_tokens // BLOCK_SIZE for one in plan.admissions}
        given = [
            block
            for change in plan.block_changes
            for block in change.block_ids[max(0, num_cached.get(change.slot, 0) - change.first) :]
        ]
        assert len(set(given)) == len(given)
        assert set(given).isdisjoint(chain(*self.touched))

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule()
    def commit(self) -> None:
        self.touched.popleft()
        seen_before = {one.id for one in self.driver.requests.values() if one.has_failed} | self.suspects
        outcome = self.driver.commit()
        failed = self.check_errors(outcome)
        self.check_faults(outcome, failed, seen_before)
        for request in outcome.finished:
            if request not in failed:
                self.check_ended(request)
        self.failing_rows, self.shed = set(), {}

    @precondition(lambda self: self.driver.in_flight and self.driver.in_flight[0].num_sequences)
    @rule(data=st.data())
    def commit_failed_rows(self, data: st.DataObject) -> None:
        plan = self.driver.in_flight[0]
        self.failing_rows = data.draw(st.sets(st.integers(0, plan.num_sequences - 1), min_size=1))
        self.commit()

    @precondition(lambda self: self.driver.in_flight and self.driver.in_flight[0].num_sequences)
    @rule(data=st.data())
    def commit_lost_rows(self, data: st.DataObject) -> None:
        plan = self.driver.plans[len(self.driver.outcomes)]
        self.driver.lost_rows = data.draw(st.sets(st.integers(0, plan.num_sequences - 1), min_size=1))
        self.commit()

    @precondition(lambda self: self.driver.in_flight and self.driver.in_flight[0].most_seconds is not None)
    @rule(data=st.data())
    def commit_shed_rows(self, data: st.DataObject) -> None:
        """A slow step leaves out rows; meanwhile one of its requests may have failed."""
        plan = self.driver.in_flight[0]
        for number, chunk in enumerate(plan.chunks, len(plan.decodes)):
            length = data.draw(st.integers(1, chunk.length))
            if length < chunk.length:
                self.shed[number] = Shed(length, data.draw(st.integers(length, chunk.length)))
        if data.draw(st.booleans()):
            self.driver.lost_rows = data.draw(st.sets(st.integers(0, plan.num_sequences - 1), max_size=1))
        before = [self.driver.requests[chunk.request_id].num_committed for chunk in plan.chunks]
        epochs = [self.driver.requests[chunk.request_id].epoch for chunk in plan.chunks]
        shed = dict(self.shed)
        self.commit()
        for number, (chunk, committed, epoch) in enumerate(zip(plan.chunks, before, epochs, strict=True)):
            request = self.driver.requests[chunk.request_id]
            if request.epoch == epoch == chunk.epoch:
                index = len(plan.decodes) + number
                length = shed[index].length if index in shed else chunk.length
                assert request.num_committed == committed + length
                assert request.num_scheduled == request.num_committed

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule(fault=st.sampled_from(("the device is lost", "the device is lost", "out of memory")))
    def commit_failed_steps(self, fault: str) -> None:
        """A device that is lost loses every step in flight: those behind the first build on tokens that never came."""
        self.device_fault = fault
        while self.scheduler.num_in_flight:
            self.commit()
            self.check_all()
        self.device_fault = ""

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.scheduler.can_schedule:
                self.schedule()
            if self.scheduler.num_in_flight:
                self.commit()
            self.check_all()

    # ---- promises ----

    def check_errors(self, outcome: Committed) -> list[Request]:
        """A failed sequence ends its request, unless that left its slot meanwhile; and nothing else ends in error."""
        names, errors = names_in(outcome.plan), {**outcome.result.faults, **outcome.result.errors}
        epochs = [*outcome.plan.decodes.epochs, *(chunk.epoch for chunk in outcome.plan.chunks)]
        assert not {index for _, index, _ in outcome.emissions} & set(errors)
        failed = [request for request in outcome.finished if request.finish_reason is FinishReason.ERROR]
        for index, message in errors.items():
            request = self.driver.requests[names[index]]
            if request in failed:
                assert request.error == message
                assert request.epoch == epochs[index] + 1
            else:
                assert request.epoch > epochs[index]
        assert {request.id for request in failed} <= {names[index] for index in errors}
        return failed

    @property
    def suspects(self) -> set[str]:
        return set(self.scheduler._recovery.suspects)

    def check_faults(self, outcome: Committed, failed: list[Request], seen_before: set[str]) -> None:
        """A lost row is computed again, or ends its request if that has failed before; it gives no token."""
        names, faults = names_in(outcome.plan), outcome.result.faults
        assert not {index for _, index, _ in outcome.emissions} & set(faults)
        lost = {names[index] for index in faults}
        assert all(request.status is Status.PREEMPTED and request.id in lost for request in outcome.retried)
        ended = {request.id for request in failed if request.id in lost}
        assert ended.isdisjoint(request.id for request in outcome.retried)
        assert ended <= seen_before, "a request ended at its first fault"
        if not outcome.result.out_of_memory:
            assert seen_before.isdisjoint(request.id for request in outcome.retried), "a request was retried twice"

    @invariant()
    def check_all(self) -> None:
        if not hasattr(self, "driver"):
            return
        assert self.suspects <= set(self.scheduler.requests)
        check_scheduler(self.scheduler, self.touched)
        for request in self.driver.requests.values():
            assert not (request.is_finished and request.block_ids)

    def check_ended(self, request: Request) -> None:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.num_output_tokens == request.sampling.max_tokens
        self.driver.check_output(request)

    def teardown(self) -> None:
        """Every request ends, all blocks and slots are free again, and the same calls give the same plans."""
        if not hasattr(self, "driver"):
            return
        self.driver.run(max_steps=20_000)
        self.touched.clear()
        for name, request in self.driver.requests.items():
            assert request.is_finished
            self.driver.check_output(request)
            if name in self.kept:
                assert request.num_output_tokens == self.kept[name]
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks >= NUM_BLOCKS // 2
        self.check_all()
        if self.scheduler.tier is not None:
            stored = self.driver.executor._tier.keys()
            assert stored == self.scheduler.tier._stored.keys(), "a block is stored that nothing drops"
        self.check_all_slots_are_free()
        check_replay(self.driver.header, self.driver.calls)

    def check_all_slots_are_free(self) -> None:
        self.driver.set_policy(PolicySpec.parse("fixed:64"))
        for _ in range(MAX_SEQS):
            self.driver.add(1, max_tokens=12)
        most = 0
        while self.driver.step():
            most = max(most, self.scheduler.num_running)
        assert most == MAX_SEQS, "a slot is lost"


def sized(machine: type[RuleBasedStateMachine], max_examples: int) -> Any:
    """The test of a state machine, with so many examples."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    machine.TestCase.settings = settings(
        max_examples=max_examples, stateful_step_count=50, deadline=None, suppress_health_check=checks
    )
    return machine.TestCase


class LongSchedulerMachine(SchedulerMachine):
    """The same with more examples."""


TestSchedulerMachine = sized(SchedulerMachine, 15)
TestLongSchedulerMachine = pytest.mark.slow(sized(LongSchedulerMachine, 60))
