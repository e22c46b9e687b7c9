"""The simulator's rule of vLLM plans what vLLM's own scheduler plans, step by step."""

from __future__ import annotations

import random

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.simulation.devices import Ran
from evenflow.simulation.own_engine import OwnEngine
from evenflow.simulation.rules import other_rules
from tests.vllm.driving import Driver, h200_like, make_request, make_scheduler

Arrival = tuple[float, str, int, int]  # when, who, the lengths of its prompt and its answer
Step = tuple[dict[str, int], set[str]]  # chunks and decodes


def load(seed: int) -> list[Arrival]:
    rng = random.Random(seed)
    at, found = 0.0, list[Arrival]()
    for number in range(60):
        at += rng.expovariate(8.0) * rng.choice((0.0, 1.0, 2.0))
        found.append((at, f"r{number}", int(10 ** rng.uniform(0.5, 4.2)), rng.randrange(1, 80)))
    return found


def planned_by_vllm(arrivals: list[Arrival], budget: int, max_num_seqs: int) -> list[Step]:
    driver = Driver(make_scheduler(None, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs))
    waiting = list(arrivals)
    while waiting or driver.scheduler.has_requests():
        if not driver.scheduler.has_requests():
            driver.now = max(driver.now, waiting[0][0])
        while waiting and waiting[0][0] <= driver.now:
            _, name, prompt, answer = waiting.pop(0)
            driver.add(make_request(prompt, answer, request_id=name))
        driver.step()
    return [(ran.chunks, set(ran.decodes)) for ran in driver.ran if ran.chunks or ran.decodes]


def planned_by_us(arrivals: list[Arrival], budget: int, max_num_seqs: int) -> list[Step]:
    config = SchedulerConfig(
        num_blocks=20_000,
        policy=PolicySpec.parse(f"vllm:{budget}"),
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,
    )
    engine = OwnEngine(Scheduler(config, ExecutorCaps(max_prefill_sequences=1024)))
    waiting, steps, now = list(arrivals), list[Step](), 0.0
    while waiting or engine.scheduler.requests:
        if not engine.scheduler.requests:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            _, name, prompt, answer = waiting.pop(0)
            sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
            engine.scheduler.add(Request(name, [1] * prompt, sampling, seed=0, max_model_len=1 << 20, arrival_time=now))
        work = engine.schedule(now)
        assert work is not None
        [plan] = engine.scheduler.plans_in_flight
        chunks = {chunk.request_id: chunk.length for chunk in plan.chunks}
        steps.append((chunks, set(plan.decodes.request_ids)))
        # What the fake runner of the other side counts as attention: the positions up to each chunk's end.
        attention = sum((start + length) * length for start, length in work.chunks) + work.decode_context
        seconds = h200_like(work.num_rows, attention, work.num_decodes)
        now += seconds
        engine.commit(Ran(seconds), now)
    return steps


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 128), (2048, 8), (8192, 128)])
def test_plans_are_the_same(seed: int, budget: int, max_num_seqs: int) -> None:
    arrivals = load(seed)
    with other_rules():
        ours = planned_by_us(arrivals, budget, max_num_seqs)
    theirs = planned_by_vllm(arrivals, budget, max_num_seqs)
    assert len(theirs) > 200
    for number, (expected, found) in enumerate(zip(theirs, ours, strict=True)):
        assert found == expected, f"step {number}"
