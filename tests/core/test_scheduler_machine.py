"""A state machine that adds, aborts, schedules, commits and finishes at random, with the scheduler's promises checked
after every rule. The fake executor's tokens depend on every cell of KV read, so a misused block shows in the output.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.request import FinishReason, Request
from tests.core.driving import Driver

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
)
NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, BUDGET = 24, 4, 6, 96
LONGEST = 60


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        depth=st.sampled_from((1, 2)),
        caching=st.booleans(),
        threshold=st.sampled_from((0, 5)),
        alignment=st.sampled_from((1, 4)),
        max_prefills=st.sampled_from((1, 3, 16)),
    )
    def start(self, policy: str, depth: int, caching: bool, threshold: int, alignment: int, max_prefills: int) -> None:
        caps = ExecutorCaps(depth, max_prefill_sequences=max_prefills, chunk_alignment=alignment)
        self.driver = Driver(
            policy,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=BUDGET,
            caps=caps,
            cost=lambda shape: 0.001 * shape.total_rows,
            long_prefill_token_threshold=0 if policy == "unchunked" else threshold,
            enable_prefix_caching=caching,
        )
        self.scheduler = self.driver.scheduler
        self.kept: dict[str, int] = {}
        self.touched: deque[set[int]] = deque()  # blocks of each step in flight

    @rule(length=st.integers(1, LONGEST), max_tokens=st.integers(1, 30), family=st.integers(0, 2))
    def add(self, length: int, max_tokens: int, family: int) -> None:
        """Prompts of one family share all but their length."""
        prompt = [family] * length
        self.driver.add(prompt, max_tokens=min(max_tokens, NUM_BLOCKS * BLOCK_SIZE - length), ignore_eos=True)

    @precondition(lambda self: self.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(sorted(self.scheduler.requests))))

    @precondition(lambda self: any(r.num_output_tokens for r in self.scheduler.requests.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """As a stop string does: the end lies behind, some output is cut."""
        names = sorted(name for name, r in self.scheduler.requests.items() if r.num_output_tokens)
        name = data.draw(st.sampled_from(names))
        keep = data.draw(st.integers(0, self.driver.requests[name].num_output_tokens))
        assert self.scheduler.finish(name, FinishReason.STOP, keep)
        self.kept[name] = keep

    @precondition(lambda self: self.scheduler.can_schedule)
    @rule()
    def schedule(self) -> None:
        decoding = set(self.scheduler._decoding)
        plan = self.driver.schedule()
        if plan is None:
            assert self.scheduler.num_in_flight or not self.scheduler.requests, "stuck with work left"
            return
        names = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]
        self.touched.append({block for name in names for block in self.driver.requests[name].block_ids})
        bound = max(self.scheduler.policy.max_step_tokens, len(plan.decodes) + FLOOR_TOKENS)
        one_whole_prompt = self.scheduler.config.policy == "unchunked" and len(plan.chunks) == 1
        assert plan.num_rows <= bound or one_whole_prompt
        assert len(plan.chunks) <= self.scheduler.caps.max_prefill_sequences
        slots = [*plan.decodes.slots, *(chunk.slot for chunk in plan.chunks)]
        assert len(set(slots)) == len(slots)
        assert set(plan.decodes.request_ids) <= decoding

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule()
    def commit(self) -> None:
        self.touched.popleft()
        for request in self.driver.commit().finished:
            self.check_ended(request)

    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.scheduler.can_schedule:
                self.schedule()
            if self.scheduler.num_in_flight:
                self.commit()
            self.check_all()

    @invariant()
    def check_all(self) -> None:
        if not hasattr(self, "driver"):
            return
        scheduler = self.scheduler
        scheduler.pool.check_invariants()
        free = set(scheduler.pool._clean) | set(scheduler.pool._idle)
        assert not any(free & touched for touched in self.touched), "a block is free that a step in flight touches"
        references: dict[int, int] = {}
        for request in self.driver.requests.values():
            self.check_counters(request)
            for block in request.block_ids:
                references[block] = references.get(block, 0) + 1
        assert {b: n for b, n in enumerate(scheduler.pool._references) if n} == references, "a block without its owner"
        taken = [r.slot for r in scheduler.requests.values() if r.slot >= 0]
        assert sorted(taken + scheduler._free_slots) == list(range(MAX_SEQS)), "a slot is lost or shared"
        assert scheduler.num_running + len(scheduler.waiting) == len(scheduler.requests)

    @staticmethod
    def check_counters(request: Request) -> None:
        if request.is_finished:
            assert request.block_ids == []
            return
        assert 0 <= request.num_committed <= request.num_scheduled <= request.num_known + request.num_pending
        assert request.num_output_tokens + request.num_pending <= request.sampling.max_tokens
        assert len(request.block_ids) * BLOCK_SIZE >= request.num_scheduled

    def check_ended(self, request: Request) -> None:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.num_output_tokens == request.sampling.max_tokens
        self.driver.check_output(request)

    def teardown(self) -> None:
        """Nothing starves: every request ends; then every block is free, and the same calls give the same plans."""
        if not hasattr(self, "driver"):
            return
        self.driver.run(max_steps=20_000)
        self.touched.clear()
        for name, request in self.driver.requests.items():
            assert request.is_finished
            self.driver.check_output(request)
            if name in self.kept:
                assert request.num_output_tokens == self.kept[name]
        assert self.scheduler.pool.num_free == NUM_BLOCKS
        self.check_all()


IN_CI = bool(os.environ.get("CI"))
SchedulerMachine.TestCase.settings = settings(
    max_examples=80 if IN_CI else 40,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestSchedulerMachine: Any = SchedulerMachine.TestCase
