"""One load through evenflow's own scheduler and through the steering of a host: the same steps, in the same order."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytest

from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.service_classes import Classes, ServiceClass
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Host, HostRequest
from evenflow.simulation.devices import ModelDevice
from evenflow.simulation.host_engine import HostOutcome, SteeredHostEngine
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.own_engine import OwnEngine
from evenflow.simulation.replica import Engine, Replica
from tests.core.driving import layout

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


Add = Callable[[Arrival, float], None]
Commit = Callable[[Any, float], list[Timed]]


def simulated(arrivals: list[Arrival], engine: Engine[Any], add: Add, commit: Commit) -> None:
    replica = Replica(engine, ModelDevice(lambda work: cost(work.shape(ExecutorCaps()))), commit)

    def arrive(one: Arrival, now: float) -> Iterable[Timed]:
        return replica.receive(partial(add, one), now)

    Loop((one.at, partial(arrive, one)) for one in arrivals).run()


def own_steps(arrivals: list[Arrival], policy: str, depth: int, classes: Classes) -> list[Step]:
    """Of evenflow's scheduler."""
    config = SchedulerConfig(
        num_blocks=100_000,
        policy=PolicySpec.parse(policy).bounded(BUDGET),
        max_num_seqs=MAX_SEQS,
        enable_prefix_caching=False,
        classes=classes,
    )
    scheduler, steps = Scheduler(config, ExecutorCaps(max_steps_in_flight=depth)), list[Step]()

    def add(one: Arrival, now: float) -> None:
        sampling = SamplingParams(max_tokens=one.max_tokens, tbt_target=one.tbt_target, ignore_eos=True)
        request = Request(one.name, [0] * one.num_prompt_tokens, sampling, seed=0, max_model_len=1 << 20)
        request.arrival_time, request.tenant, request.service_class = one.at, one.tenant, one.service_class
        scheduler.add(request)

    def commit(committed: Committed, now: float) -> list[Timed]:
        steps.append(Step(*layout(committed.plan)))
        return []

    simulated(arrivals, OwnEngine(scheduler), add, commit)
    return steps


def host_steps(arrivals: list[Arrival], policy: str, depth: int, classes: Classes) -> list[Step]:
    """Of a host engine that does as its steering says."""
    caps = ExecutorCaps(max_steps_in_flight=depth)
    host = Host(caps, BUDGET, MAX_SEQS, None, logging.getLogger("simulated"))
    settings = Settings(PolicySpec.parse(policy), None, None, classes)
    engine, steps = SteeredHostEngine(host, settings, depth), list[Step]()

    def add(one: Arrival, now: float) -> None:
        sizes = one.num_prompt_tokens, one.num_prompt_tokens, 0, one.max_tokens
        own = {"tbt_target": one.tbt_target, "tenant": one.tenant, "service_class": one.service_class}
        engine.add(HostRequest(one.name, one.at, *sizes, **own), now)

    def commit(outcome: HostOutcome, now: float) -> list[Timed]:
        steps.append(Step(list(outcome.step.decode_ids), outcome.step.chunks))
        return []

    simulated(arrivals, engine, add, commit)
    return steps


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
def test_both_plan_the_same_steps(policy: str, seeds: range, classes: Classes, tenants: int, depth: int) -> None:
    for seed in seeds:
        arrivals = load(seed, tenants, classes)
        ours, theirs = (steps(arrivals, policy, depth, classes) for steps in (own_steps, host_steps))
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert sorted(one.decodes) == sorted(other.decodes), f"seed {seed}, step {number}"
            assert one.chunks == other.chunks, f"seed {seed}, step {number}"
