"""One load through evenflow's own scheduler and through the steering of a host: the same steps, in the same order."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate
from evenflow.core.service_classes import Classes, ServiceClass
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering
from tests.core.driving import Driver, layout

BUDGET, MAX_SEQS = 2048, 64
ONE_CLASS: Classes = (ServiceClass(name="standard", rank=0, share=0.1),)
CLASSES: Classes = (
    ServiceClass(name="chat", rank=-1, share=0.3, ttft_target=0.4),
    ServiceClass(name="standard", rank=0, share=0.1),
    ServiceClass(name="batch", rank=1, share=0.1, tbt_target=0.2),
)


class Arrival(NamedTuple):
    at: float
    name: str
    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""
    service_class: str = ""
    tbt_target: float | None = None


class Step(NamedTuple):
    """What a step computes."""

    decodes: list[str]
    chunks: list[tuple[str, int, int]]


def cost(shape: StepShape) -> float:
    return 0.004 + 4e-5 * shape.total_rows + 2e-8 * shape.prefill_attention + 1e-7 * shape.decode_context


def load(seed: int, tenants: int, classes: Classes) -> list[Arrival]:
    rng = random.Random(seed)
    at, arrivals = 0.0, []
    for number in range(60):
        at += rng.expovariate(8.0)
        arrivals.append(
            Arrival(
                at,
                f"r{number}",
                rng.choice([8, 60, 300, 1500, 5000]),
                rng.randint(1, 40),
                f"t{rng.randrange(tenants)}",
                rng.choice(classes).name,
                rng.choice([None, None, None, 0.08]),
            )
        )
    return arrivals


def own_steps(arrivals: list[Arrival], policy: str, depth: int, classes: Classes) -> Iterator[Step]:
    """Of evenflow's scheduler."""
    caps = ExecutorCaps(max_steps_in_flight=depth)
    driver = Driver(
        policy,
        num_blocks=100_000,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=BUDGET,
        caps=caps,
        cost=cost,
        enable_prefix_caching=False,
        classes=classes,
    )
    to_come, num_seen = deque(arrivals), 0
    while to_come or driver.scheduler.has_work:
        clock = driver.executor.clock
        while to_come and to_come[0].at <= clock.now:
            one = to_come.popleft()
            driver.add(
                one.num_prompt_tokens,
                one.max_tokens,
                one.name,
                one.tenant,
                one.service_class,
                tbt_target=one.tbt_target,
            )
        if not driver.step():
            clock.now = max(clock.now, to_come[0].at)
        for plan in driver.plans[num_seen:]:
            yield Step(*layout(plan))
        num_seen = len(driver.plans)


@dataclass(slots=True, eq=False)
class _Request:
    arrival: Arrival
    num_computed: int = 0
    num_sampled: int = 0
    num_given: int = 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.arrival.num_prompt_tokens


class Clocked(Steering):
    now = 0.0

    def clock(self) -> float:
        return self.now

    wall_clock = clock

    def keep_step_times(self) -> None:
        return


class FakeHost:
    """An engine that does as its steering says, at once."""

    def __init__(self, policy: str, depth: int, classes: Classes, folder: Path) -> None:
        log = logging.getLogger("fake-host")
        host = Host(ExecutorCaps(max_steps_in_flight=depth), BUDGET, MAX_SEQS, folder / "step-times", log)
        self.steering = Clocked(host, Settings(PolicySpec.parse(policy), None, None, classes))
        self._depth = depth
        self._requests: dict[str, _Request] = {}  # unfinished
        self._waiting: dict[str, _Request] = {}
        self._flight: deque[tuple[InFlightStep, list[_Request], float]] = deque()
        self._free_at = 0.0

    def steps(self, arrivals: list[Arrival]) -> Iterator[Step]:
        to_come = deque(arrivals)
        while to_come or self._requests:
            while to_come and to_come[0].at <= self.steering.now:
                self._add(to_come.popleft())
            while len(self._flight) < self._depth and (step := self._schedule()) is not None:
                yield step
            if self._flight:
                self._finish()
            else:
                self.steering.now = max(self.steering.now, to_come[0].at)

    def _add(self, one: Arrival) -> None:
        self._requests[one.name] = self._waiting[one.name] = _Request(one)
        prompt = one.num_prompt_tokens
        self.steering.add(
            HostRequest(
                one.name,
                self.steering.now,
                prompt,
                prompt,
                0,
                one.max_tokens,
                one.tbt_target,
                tenant=one.tenant,
                service_class=one.service_class,
            )
        )

    def _schedule(self) -> Step | None:
        steering, now = self.steering, self.steering.now
        steering.begin_step()
        running = [one for name, one in self._requests.items() if name not in self._waiting]
        decodes = [one for one in running if not one.is_prefilling and one.num_sampled < one.arrival.max_tokens]
        decoding = [Decode(one.arrival.name, 1, one.num_computed + one.num_sampled) for one in decodes]
        prefilling = [one for one in running if one.is_prefilling]
        names = list(steering.line_up(now, [*(one.arrival.name for one in prefilling), *self._waiting], MAX_SEQS))
        room = MAX_SEQS - len(running)
        left_out = set([name for name in names if name in self._waiting][room:])
        names = [name for name in names if name not in left_out][: ExecutorCaps().max_prefill_sequences]
        prompts = [self._requests[name] for name in names]
        _, quotas = steering.plan(
            now,
            decoding,
            [_candidate(one) for one in prompts],
            free_tokens=10**9,
            long_prefill_token_threshold=0,
        )
        if not decodes and not quotas:
            return None
        step = InFlightStep(now, {one.arrival.name for one in decodes})
        step.key = step
        samples = list(decodes)
        for quota in quotas:
            one = prompts[quota.candidate]
            self._waiting.pop(one.arrival.name, None)
            step.chunks.append((one.arrival.name, one.num_computed, quota.tokens))
            one.num_computed += quota.tokens
            if not one.is_prefilling:
                samples.append(one)
        for one in samples:
            one.num_sampled += 1
        steering.scheduled(step, decoding, len(samples) - len(decodes))
        assert step.shape is not None
        self._free_at = max(self._free_at, now) + cost(step.shape)
        self._flight.append((step, samples, self._free_at))
        return Step([one.arrival.name for one in decodes], list(step.chunks))

    def _finish(self) -> None:
        step, samples, end = self._flight.popleft()
        steering = self.steering
        steering.now = max(steering.now, end)
        ended = steering.ended(step.key)
        for one in samples:
            one.num_given += 1
            if one.num_given == one.arrival.max_tokens:
                del self._requests[one.arrival.name]
        tokens = {one.arrival.name: [0] for one in samples}
        load = HostLoad(len(self._requests) - len(self._waiting), len(self._waiting), 0.0)
        steering.emitted(ended, tokens, self._requests, load)


def _candidate(one: _Request) -> Candidate:
    prompt = one.arrival.num_prompt_tokens
    return Candidate(one.arrival.name, one.num_computed, prompt - one.num_computed, prompt)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tenants", [1, 4])
@pytest.mark.parametrize("classes", [ONE_CLASS, CLASSES], ids=["one class", "three classes"])
@pytest.mark.parametrize(
    ("policy", "seeds"),
    [
        ("target:50ms", range(1)),
        pytest.param("target:50ms", range(1, 4), marks=pytest.mark.slow),
        pytest.param("target:50ms,paced", range(4), marks=pytest.mark.slow),
    ],
)
def test_both_plan_the_same_steps(
    policy: str,
    seeds: range,
    classes: Classes,
    tenants: int,
    depth: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in seeds:
        arrivals = load(seed, tenants, classes)
        ours = own_steps(arrivals, policy, depth, classes)
        theirs = FakeHost(policy, depth, classes, tmp_path).steps(arrivals)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert sorted(one.decodes) == sorted(other.decodes), f"seed {seed}, step {number}"
            assert one.chunks == other.chunks, f"seed {seed}, step {number}"
