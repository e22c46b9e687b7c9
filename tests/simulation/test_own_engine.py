"""evenflow's scheduler in virtual time plans what it plans under an executor, and nobody is forgotten."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, StepPlan, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.tier import TierConfig
from evenflow.errors import EngineFailed, InvalidConfig
from evenflow.simulation.devices import BlockNoise, ModelDevice
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.own_engine import OwnEngine, work_of
from evenflow.simulation.replica import Replica
from tests.core.driving import Driver, layout

BUDGET = 512


def cost(shape: StepShape) -> float:
    return 0.004 + 4e-5 * shape.total_rows + 2e-8 * shape.prefill_attention + 1e-7 * shape.decode_context


def scheduler_of(policy: str, caps: ExecutorCaps, num_blocks: int = 1000) -> Scheduler:
    spec = PolicySpec.parse(policy).bounded(BUDGET)
    return Scheduler(SchedulerConfig(num_blocks=num_blocks, policy=spec, max_num_seqs=16), caps)


def request(name: str, prompt: list[int], max_tokens: int, at: float = 0.0) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    hashes = hash_blocks(prompt, 16)
    return Request(name, prompt, sampling, seed=0, max_model_len=1 << 20, block_hashes=hashes, arrival_time=at)


class Simulation:
    """Requests on one replica, as (arrival, request)."""

    def __init__(self, scheduler: Scheduler, device: ModelDevice, requests: Iterable[tuple[float, Request]]) -> None:
        self.outcomes: list[Committed] = []
        self.times: dict[str, list[float]] = {}
        self._scheduler = scheduler
        self._replica = Replica(OwnEngine(scheduler), device, self._commit)
        Loop((at, partial(self._arrive, one)) for at, one in requests).run()

    def _arrive(self, one: Request, now: float) -> Iterable[Timed]:
        return self._replica.receive(lambda _: self._scheduler.add(one), now)

    def _commit(self, committed: Committed, now: float) -> list[Timed]:
        self.outcomes.append(committed)
        for one, _, tokens in committed.emissions:
            self.times.setdefault(one.id, []).extend([now] * len(tokens))
        return []


def device_for(caps: ExecutorCaps) -> ModelDevice:
    return ModelDevice(lambda work: cost(work.shape(caps)))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fixed:256", "target:30ms", "target:50ms,paced"])
def test_plans_and_times_are_those_of_an_executor(policy: str, depth: int) -> None:
    caps = ExecutorCaps(max_steps_in_flight=depth)
    driver = Driver(policy, num_blocks=80, max_num_batched_tokens=BUDGET, caps=caps, cost=cost)  # some are preempted
    prompts = [40, 300, 20, 700, 90, 300]
    for number, length in enumerate(prompts):
        driver.add([number + 1] * length, 30 + number)
    driver.run()
    found = Simulation(
        scheduler_of(policy, caps, num_blocks=80),
        device_for(caps),
        [(0.0, request(f"r{n}", [n + 1] * length, 30 + n)) for n, length in enumerate(prompts)],
    )
    assert [layout(one.plan) for one in found.outcomes] == [layout(plan) for plan in driver.plans]
    assert [one.result.seconds for one in found.outcomes] == [one.result.seconds for one in driver.outcomes]
    assert {name: len(times) for name, times in found.times.items()} == {f"r{n}": 30 + n for n in range(len(prompts))}


def test_a_prefix_is_computed_once() -> None:
    caps, prompt = ExecutorCaps(), [7] * 256
    found = Simulation(
        scheduler_of("unchunked", caps),
        device_for(caps),
        [(0.0, request("a", prompt, 2)), (1.0, request("b", prompt, 2))],
    )
    admissions = [one for outcome in found.outcomes for one in outcome.plan.admissions]
    assert [(one.request_id, one.num_cached_tokens) for one in admissions] == [("a", 0), ("b", 240)]
    assert found.times["b"][0] - 1.0 < found.times["a"][0]


def test_a_slow_step_sheds_rows_that_are_computed_later() -> None:
    caps = ExecutorCaps(sheds_rows=True)
    slowly = BlockNoise([1.0, 0.3], [1.0, 4.0])
    device = ModelDevice(lambda work: cost(work.shape(caps)), slowly, num_layers=20)
    requests = [
        (0.0, request("chat", [1] * 30, 400)),
        *((0.2 * n, request(f"r{n}", [n] * 900, 2)) for n in range(2, 12)),
    ]
    found = Simulation(scheduler_of("target:30ms", caps), device, requests)
    assert any(outcome.result.shed for outcome in found.outcomes)
    chunks = [chunk for outcome in found.outcomes for chunk in outcome.computed.chunks]
    assert sum(chunk.length for chunk in chunks if chunk.request_id == "r2") == 900
    assert {name: len(times) for name, times in found.times.items()} == {"chat": 400} | {
        f"r{n}": 2 for n in range(2, 12)
    }


def test_work_has_the_shape_of_its_plan() -> None:
    caps, plans = ExecutorCaps(row_buckets=(8, 64)), list[StepPlan]()
    found = Simulation(
        scheduler_of("fixed:64", caps), device_for(caps), [(0.0, request(f"r{n}", [n] * 100, 3)) for n in range(3)]
    )
    plans = [outcome.plan for outcome in found.outcomes]
    assert any(len(plan.decodes) and plan.chunks for plan in plans)
    assert [work_of(plan).shape(caps) for plan in plans] == [plan.shape(caps) for plan in plans]


def test_a_scheduler_that_plans_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    caps = ExecutorCaps()
    scheduler = scheduler_of("fixed:64", caps)
    monkeypatch.setattr(scheduler, "schedule", lambda now: None)
    with pytest.raises(EngineFailed, match="no step can be planned for 1 unfinished request"):
        Simulation(scheduler, device_for(caps), [(0.0, request("stuck", [1] * 10, 1))])


def test_a_tier_is_refused() -> None:
    config = SchedulerConfig(num_blocks=10, tier=TierConfig(num_blocks=10, save_seconds=0.1, restore_seconds=0.1))
    with pytest.raises(InvalidConfig, match="KV tier"):
        OwnEngine(Scheduler(config))
