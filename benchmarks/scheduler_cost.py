"""What planning costs: schedule() + commit() and the steering of a host with 64 to 1,024 decoding requests, with a
budget, with a target and with a prompt to compute besides, and a long prompt's prefix lookup.

Run: python benchmarks/scheduler_cost.py
To compare with another checkout, set PYTHONPATH to its `src`.
"""

from __future__ import annotations

import logging
import statistics
import time

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult, StepShape
from evenflow.core.policies import DEFAULT_POLICY, PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering

STEPS = 400
LONG_PROMPT = 100_000
ENDLESS_PROMPT = 1_000_000  # tokens: more than STEPS steps compute under TARGET
CAPS = ExecutorCaps()
TARGET = PolicySpec.parse("target:50ms")


def seconds_of(shape: StepShape) -> float:
    """A machine on which a step of 256 streams leaves room for some 1,000 tokens of prefill within TARGET."""
    return 0.004 + 4e-5 * shape.total_rows + 1e-9 * shape.prefill_attention


def answer(plan: StepPlan) -> StepResult:
    """The cheapest executor: token 1 for every request."""
    tokens = ((1,),) * len(plan.decodes) + tuple((1,) if chunk.samples else () for chunk in plan.chunks)
    return StepResult(plan.step_id, tokens, seconds_of(plan.shape(CAPS)))


def decoding_scheduler(num_requests: int, policy: PolicySpec = DEFAULT_POLICY) -> Scheduler:
    """With these streams, and room for one request more."""
    num_blocks = num_requests * 64 + ENDLESS_PROMPT // 16 + 1
    scheduler = Scheduler(SchedulerConfig(num_blocks=num_blocks, max_num_seqs=num_requests + 1, policy=policy))
    for index in range(num_requests):
        add(scheduler, str(index), [index, *range(2, 32)], 0.0)
    while len(scheduler.waiting) or scheduler.num_running < num_requests:
        step(scheduler)
    return scheduler


def add(scheduler: Scheduler, name: str, prompt: list[int], now: float) -> None:
    sampling = SamplingParams(max_tokens=900, ignore_eos=True)
    hashes = hash_blocks(prompt, scheduler.block_size)
    request = Request(name, prompt, sampling, seed=0, max_model_len=1 << 20, block_hashes=hashes, arrival_time=now)
    scheduler.add(request)


def step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.commit(answer(plan), 0.0)
    return plan


def step_cost(num_requests: int, policy: PolicySpec = DEFAULT_POLICY, *, has_prompt: bool = False) -> float:
    """Median seconds of one schedule() + commit(), if asked with a chunk of a prompt that does not end."""
    scheduler, now = decoding_scheduler(num_requests, policy), 0.0
    if has_prompt:
        add(scheduler, "endless", [1] * ENDLESS_PROMPT, now)
    costs = []
    for _ in range(STEPS):
        plan_start = time.perf_counter()
        plan = scheduler.schedule(now)
        planned = time.perf_counter() - plan_start
        assert plan is not None
        assert len(plan.decodes) == num_requests
        assert len(plan.chunks) == has_prompt
        result = answer(plan)
        now += result.seconds
        commit_start = time.perf_counter()
        scheduler.commit(result, now)
        costs.append(planned + time.perf_counter() - commit_start)
    return statistics.median(costs)


def steering_cost(num_requests: int) -> float:
    """Median seconds of what a host's step spends in the steering: the decodes are described to it already."""
    host = Host(ExecutorCaps(), 8192, num_requests, None, logging.getLogger("cost"))
    steering = Steering(host, Settings(TARGET, None, None))
    names = [str(index) for index in range(num_requests)]
    for name in names:
        steering.add(HostRequest(name, 0.0, 31, 31, 0, 900))
    tokens, open_requests, load = dict.fromkeys(names, (1,)), dict.fromkeys(names), HostLoad(num_requests, 0, 0.5)
    costs = []
    for number in range(STEPS):
        decodes = [Decode(name, 1, 31 + number) for name in names]
        step = InFlightStep(steering.clock(), set(names), key=number)
        start = time.perf_counter()
        steering.begin_step()
        steering.plan(start, decodes, [], 1 << 20, 0)
        steering.scheduled(step, decodes, 0)
        steering.emitted(steering.ended(number), tokens, open_requests, load)
        costs.append(time.perf_counter() - start)
    return statistics.median(costs)


def lookup_cost() -> tuple[float, float]:
    """Seconds to hash a long prompt, and to look it up when all of it is cached."""
    scheduler = Scheduler(SchedulerConfig(num_blocks=LONG_PROMPT // 16 + 2))
    prompt = [token % 50_000 for token in range(LONG_PROMPT)]
    sampling = SamplingParams(max_tokens=1)
    start = time.perf_counter()
    hashes = hash_blocks(prompt, scheduler.block_size)
    hashed = time.perf_counter()
    request = Request("long", prompt, sampling, seed=0, max_model_len=1 << 20, block_hashes=hashes)
    scheduler.add(request)
    while not request.is_finished:
        step(scheduler)
    again = Request("again", prompt, sampling, seed=0, max_model_len=1 << 20, block_hashes=hashes)
    found_start = time.perf_counter()
    blocks = scheduler.prefix_cache.find(again)
    found = time.perf_counter()
    assert len(blocks) == (LONG_PROMPT - 1) // scheduler.block_size
    return hashed - start, found - found_start


def main() -> None:
    print("schedule() + commit() with a budget, with a target, with a target beside a prompt; the steering")
    print(f"median of {STEPS} steps")
    for num_requests in (64, 256, 1024):
        parts = (
            step_cost(num_requests),
            step_cost(num_requests, TARGET),
            step_cost(num_requests, TARGET, has_prompt=True),
            steering_cost(num_requests),
        )
        figures = ", ".join(f"{seconds * 1e3:6.3f}" for seconds in parts)
        print(f"  {num_requests:5d} decoding: {figures} ms, {parts[0] / num_requests * 1e6:5.2f} µs per request")
    hashing, lookup = lookup_cost()
    print(f"prefix of {LONG_PROMPT} tokens: hashing {hashing * 1e3:.1f} ms, lookup {lookup * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
