"""Drives a Scheduler by hand with a FakeExecutor, and logs every call and what came of it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, Shed, StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import FinishReason, Request, RequestRecord, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import failed_result
from evenflow.executors.fake import FakeExecutor, fake_continuation
from evenflow.executors.recorded import Record, header_record, policy_record, read, read_header, read_policy, write_line

VOCAB = 1000


class StepFailed(Exception):
    """Raised by `disturb`: the whole step fails, as when a device does."""


class Call(NamedTuple):
    """A call of the scheduler. An added request is logged as a record, because it changes later."""

    method: str
    arguments: tuple[Any, ...]
    outcome: object


class Driver:
    """One scheduler, one fake executor, and, if it `remembers`, all calls, plans, outcomes and requests so far."""

    def __init__(
        self,
        policy: str = "fixed:2048",
        *,
        num_blocks: int = 1000,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 2048,
        caps: ExecutorCaps | None = None,
        cost: Callable[[Any], float] = lambda shape: 0.0,
        disturb: Callable[[StepPlan], Mapping[int, str] | None] = lambda plan: None,
        shed: Callable[[StepPlan], Mapping[int, Shed]] = lambda plan: {},
        remembers: bool = True,
        loses: Callable[[bytes], bool] = lambda block_hash: False,
        **settings: Any,
    ) -> None:
        caps = caps or ExecutorCaps()
        self.scheduler = Scheduler(
            SchedulerConfig(
                policy=PolicySpec.parse(policy).bounded(max_num_batched_tokens),
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                **settings,
            ),
            caps,
        )
        tier = self.scheduler.config.tier
        self.executor = FakeExecutor(
            vocab_size=VOCAB,
            block_size=block_size,
            caps=caps,
            cost=cost,
            disturb=disturb,
            shed=shed,
            restore_seconds=tier.restore_seconds if tier is not None else 0.0,
            loses=loses,
        )
        self.header = header_record(self.scheduler)
        self.calls: list[Call] = []
        self.plans: list[StepPlan] = []
        self.outcomes: list[Committed] = []
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[StepPlan] = deque()
        self._remembers = remembers
        self.lost_rows: set[int] = set()  # of the oldest step in flight
        self._names = (f"r{number}" for number in count())

    def add(
        self,
        prompt: int | list[int],
        max_tokens: int = 4,
        name: str | None = None,
        tenant: str = "",
        service_class: str = "",
        salt: str | None = None,
        **sampling: Any,
    ) -> Request:
        """A prompt given as a length is made of tokens that no other prompt shares. Tenants have their own salt unless
        one is given."""
        name = name or next(self._names)
        if isinstance(prompt, int):
            prompt = [(hash_of(name) + i) % VOCAB for i in range(prompt)]
        salted = (tenant if salt is None else salt).encode()
        request = Request(
            name,
            prompt,
            SamplingParams(max_tokens=max_tokens, **sampling),
            seed=0,
            max_model_len=1 << 20,
            salt=salted,
            block_hashes=hash_blocks(prompt, self.scheduler.block_size, salted),
            arrival_time=self.executor.clock.now,
            tenant=tenant,
            service_class=service_class,
        )
        self._call("add", request)
        if self._remembers:
            self.requests[name] = request
        return request

    def abort(self, name: str) -> bool:
        return bool(self._call("abort", name))

    def finish(self, name: str, reason: FinishReason, keep: int | None = None) -> bool:
        return bool(self._call("finish", name, reason, keep))

    def expire(self) -> list[str]:
        """The names of requests whose deadlines have passed."""
        return list(self._call("expire", self.executor.clock.now))

    def set_policy(self, policy: PolicySpec) -> None:
        self._call("set_policy", policy)

    def schedule(self) -> StepPlan | None:
        plan: StepPlan | None = self._call("schedule", self.executor.clock.now)
        if plan is not None:
            self.in_flight.append(plan)
            if self._remembers:
                self.plans.append(plan)
            self.executor.submit(plan)
        return plan

    def commit(self) -> Committed:
        outcome: Committed = self._call("commit", self._wait(), self.executor.clock.now)
        if self._remembers:
            self.outcomes.append(outcome)
        return outcome

    def _wait(self) -> StepResult:
        plan = self.in_flight.popleft()
        try:
            result = self.executor.wait()
        except StepFailed as failure:  # the engine does the same
            return failed_result(plan, str(failure), out_of_memory="memory" in str(failure))
        lost, self.lost_rows = self.lost_rows, set()
        tokens = tuple(() if row in lost else given for row, given in enumerate(result.tokens))
        return replace(result, tokens=tokens, faults=dict.fromkeys(lost, "a row is NaN")) if lost else result

    def _call(self, method: str, *arguments: Any) -> Any:
        if not self._remembers:
            return getattr(self.scheduler, method)(*arguments)
        logged = tuple(one.record() if isinstance(one, Request) else one for one in arguments)
        outcome = getattr(self.scheduler, method)(*arguments)
        self.calls.append(Call(method, logged, outcome))
        return outcome

    def step(self) -> bool:
        """Fill the flight, commit one step. False where there was nothing to do."""
        while self.scheduler.can_schedule and self.schedule() is not None:
            pass
        if not self.scheduler.num_in_flight:
            return False
        self.commit()
        return True

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                assert not self.scheduler.has_work, "work is left, but no step can be planned"
                return
        raise AssertionError(f"no end after {max_steps} steps")

    def chunks(self, request: Request) -> list[tuple[int, int]]:
        return [(c.start, c.length) for plan in self.plans for c in plan.chunks if c.request_id == request.id]

    def reasons(self, request: Request) -> list[str]:
        return [str(c.reason) for plan in self.plans for c in plan.chunks if c.request_id == request.id]

    def check_output(self, request: Request) -> None:
        prompt = request.tokens[: request.num_prompt_tokens]
        assert request.output_token_ids == fake_continuation(prompt, request.num_output_tokens, VOCAB)


def check_replay(header: Record, calls: Sequence[Call]) -> None:
    """The same calls, read back from JSON, give the same plans and outcomes on a new scheduler."""
    scheduler = read_header(_through_json(header))
    for number, (method, arguments, before) in enumerate(calls):
        again = getattr(scheduler, method)(*map(_recorded, arguments))
        assert _comparable(again) == _comparable(before), f"call {number}, {method}, had another outcome"


def _recorded(argument: object) -> object:
    """An argument as a recording gives it back."""
    match argument:
        case PolicySpec():
            return read_policy(_through_json(policy_record(argument)))
        case StepResult():
            return read(_through_json(argument), StepResult)
        case RequestRecord():
            return read(_through_json(argument), RequestRecord).request()
    return argument


def _through_json(record: object) -> Record:
    return dict(json.loads(write_line(record)))


def _comparable(outcome: object) -> object:
    if isinstance(outcome, dict):  # of errors, which are equal only to themselves
        return {name: str(error) for name, error in outcome.items()}
    if not isinstance(outcome, Committed):
        return outcome
    emissions = [(request.id, index, tokens) for request, index, tokens in outcome.emissions]
    return emissions, [request.id for request in outcome.finished], outcome.late, outcome.predicted_seconds


def hash_of(name: str) -> int:
    return sum(ord(letter) * 31**place for place, letter in enumerate(name))


def layout(plan: StepPlan) -> tuple[list[str], list[tuple[str, int, int]]]:
    """A plan as (who decodes, [(request, start, length)])."""
    return list(plan.decodes.request_ids), [(c.request_id, c.start, c.length) for c in plan.chunks]
