"""Random loads in virtual time, step after step: every promise is checked at each, and every request accounted for.

Requests of all classes and many tenants come in bursts, with too little memory. They are aborted, stopped, preempted,
promoted, demoted and refused, and pass their deadlines; rows and whole steps fail; the clock jumps; policies change.
One seed draws all of it.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from evenflow.core.account import Account
from evenflow.core.plan import ExecutorCaps, StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Request
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.errors import LateRequest
from tests.core.driving import Driver, StepFailed
from tests.core.promises import check_accounts, check_scheduler

BLOCK_SIZE = 4
POLICIES = ("fixed:64", "fixed:7", "target:20ms", "target:50ms,paced", "alternate:32", "unchunked", "load")
_BUDGET = 96
_STEPS_TO_DRAIN = 20_000  # far more than all open requests need
_STEPS_BETWEEN_DRAINS = 1_000
_DRAINS_PER_DRIVER = 25
_MOST_OPEN = 10
_NUM_TENANTS = 3_000  # more than the scheduler keeps figures of
# Of the interpreter's allocated memory blocks, what the caches of a scheduler may add after its first drain.
_MAX_GROWTH = 40_000


def random_driver(rng: random.Random, disturb: object, *, refuses_late: bool, **settings: bool) -> Driver:
    """A scheduler with too little of everything."""
    urgent, *others = DEFAULT_CLASSES
    targets = (0.02,) if refuses_late else (None, 0.1, 1.0)
    return Driver(
        rng.choice(POLICIES),
        num_blocks=rng.choice((16, 30, 60)),
        block_size=BLOCK_SIZE,
        max_num_seqs=rng.choice((2, 4, 8)),
        max_num_batched_tokens=_BUDGET,
        classes=(replace(urgent, ttft_target=rng.choice(targets), refuse_late=refuses_late), *others),
        tenant_weights={"t0": 2.0},
        caps=ExecutorCaps(max_steps_in_flight=rng.choice((1, 2))),
        cost=lambda shape: 0.001 * shape.total_rows,
        enable_prefix_caching=rng.random() < 0.7,
        disturb=disturb,  # type: ignore[arg-type]
        **settings,
    )


@dataclass
class Endurance:
    """One run. `events` counts what happened, and `ends` how requests ended."""

    seed: int
    events: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._open: dict[str, Request] = {}  # taken, and not told to have ended
        self._accounts: dict[str, Account] = {}
        self._is_device_lost = False
        self._failing: Mapping[int, str] = {}
        self._touched: deque[set[int]] = deque()
        self._burst = 0.2

    def run(self, num_steps: int) -> None:
        """At least this many steps, then until all requests have ended."""
        for number in count():
            if self.events["steps"] >= num_steps:
                break
            # The first one does: every run should see refusals.
            self._driver = random_driver(self._rng, self._disturb, refuses_late=number % 3 == 0, remembers=False)
            self._scheduler = self._driver.scheduler
            memory = []
            for _ in range(_DRAINS_PER_DRIVER):
                until = min(num_steps, self.events["steps"] + _STEPS_BETWEEN_DRAINS)
                while self.events["steps"] < until:
                    self._do_something()
                    self._step()
                self._drain()
                memory.append(sys.getallocatedblocks())
                if self.events["steps"] >= num_steps:
                    break
            assert memory[-1] - memory[0] < _MAX_GROWTH, f"memory grows: {memory}"

    # ---- what happens between steps ----

    def _do_something(self) -> None:
        rng = self._rng
        while rng.random() < self._burst and len(self._open) < _MOST_OPEN:
            self._add()
        chance = rng.random()
        if chance < 0.02:
            self._end_one()
        elif chance < 0.03:
            self._burst = rng.choice((0.02, 0.1, 0.3, 0.7))
        elif chance < 0.035:
            self._driver.set_policy(PolicySpec.parse(rng.choice(POLICIES)).bounded(_BUDGET))
            self.events["policy changes"] += 1
        elif chance < 0.045:
            # Backwards too: until the step that runs ends, the scheduler is asked at an earlier time than before.
            self._driver.executor.clock.now += rng.choice((0.05, 2.0, 3600.0, -0.05, -2.0))
            self.events["clock jumps"] += 1
        for name in self._driver.expire():
            self._ended(self._open[name], "expired")

    def _add(self) -> None:
        rng, driver = self._rng, self._driver
        capacity = driver.scheduler.pool.num_blocks * BLOCK_SIZE
        length = rng.choice((rng.randint(1, capacity - 2), rng.randint(1, 20), rng.randint(1, 20)))
        keeps_targets = driver.scheduler.config.policy.target is not None
        try:
            request = driver.add(
                [rng.randint(0, 2)] * length if rng.random() < 0.5 else length,
                max_tokens=rng.randint(1, min(40, capacity - length)),
                tenant=f"t{rng.randrange(4 if rng.random() < 0.8 else _NUM_TENANTS)}",
                service_class=rng.choice(("", "interactive", "batch")),
                ignore_eos=True,
                deadline=rng.choice((None, None, None, 0.2, 3.0)),
                tbt_target=rng.choice((None, 0.005, 0.2)) if keeps_targets else None,
            )
        except LateRequest:
            self.events["refusals"] += 1
            return
        self._open[request.id] = request
        self._accounts[request.id] = request.account
        self.events["requests"] += 1

    def _end_one(self) -> None:
        """As a client that disconnects does, or a stop string."""
        if not self._open:
            return
        request = self._rng.choice(list(self._open.values()))
        if request.num_output_tokens and self._rng.random() < 0.5:
            keep = self._rng.randint(0, request.num_output_tokens)
            assert self._driver.finish(request.id, FinishReason.STOP, keep)
            assert request.num_output_tokens == keep
            self._ended(request, "stopped")
        else:
            assert self._driver.abort(request.id)
            self._ended(request, "aborted")

    def _disturb(self, plan: StepPlan) -> Mapping[int, str]:
        if self._is_device_lost:
            raise StepFailed("the device is lost")
        return self._failing

    # ---- steps ----

    def _step(self) -> None:
        driver, scheduler = self._driver, self._scheduler
        while scheduler.can_schedule and (plan := driver.schedule()) is not None:
            self.events["preempted"] += sum(one.epoch > 0 for one in plan.admissions)
            names = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]
            self._touched.append({block for name in names for block in scheduler.requests[name].block_ids})
        if scheduler.num_in_flight:
            self._commit()
            self.events["steps"] += 1
        else:
            assert not scheduler.requests, "stuck with work left"
        self._check()

    def _commit(self) -> None:
        rng, plan = self._rng, self._driver.in_flight[0]
        chance = rng.random()
        self._failing = {}
        if chance < 0.01:
            self._failing = {rng.randrange(plan.num_sequences): "a row is NaN"}
            self.events["failed rows"] += 1
        elif chance < 0.012:
            self._is_device_lost = True
            self.events["failed steps"] += 1
        # A device that is lost loses every step in flight: those behind the first build on tokens that never came.
        for _ in range(len(self._touched) if self._is_device_lost else 1):
            self._touched.popleft()
            for request in self._driver.commit().finished:
                self._ended(request, str(request.finish_reason))
        self._is_device_lost = False

    def _ended(self, request: Request, how: str) -> None:
        """It ends once, and what it got is right."""
        del self._open[request.id]
        del self._accounts[request.id]
        self.ends[how] += 1
        assert request.is_finished
        assert not request.block_ids
        assert (how == "length") == (request.finish_reason is FinishReason.LENGTH)
        assert how != "length" or request.num_output_tokens == request.sampling.max_tokens
        self._driver.check_output(request)

    def _check(self) -> None:
        scheduler = self._scheduler
        check_scheduler(scheduler, self._touched)
        check_accounts(scheduler)
        assert scheduler.requests.keys() == self._open.keys(), "a request ended and nobody was told"
        for name, request in self._open.items():
            if request.account != self._accounts[name]:
                self._accounts[name] = request.account
                self.events["class changes"] += 1

    def _drain(self) -> None:
        """Every open request ends, and nothing is left of any."""
        for _ in range(_STEPS_TO_DRAIN):
            if not self._scheduler.has_work:
                break
            self._step()
        assert not self._scheduler.has_work, f"no end after {_STEPS_TO_DRAIN} steps: {self._scheduler.requests}"
        assert not self._open
        pool = self._scheduler.pool
        assert pool.num_free == pool.num_blocks
        self.events["drains"] += 1

    def check_accounts_add_up(self) -> None:
        assert self.events["requests"] == self.ends.total()
