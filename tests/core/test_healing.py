"""No estimate prevents what would correct it: each heals within a bounded number of steps, however wrong it was.

| estimate | used for | test |
|---|---|---|
| step times: learned, stored or a prior | how much prefill a step takes | here |
| recent overhead of steps | the same | here |
| what is feasible: the engine's target, a stream's own | advice, whose targets count | here, `test_target_policy` |
| pace of prefill | refusals, Retry-After | here, `test_service_order` |
| when a step counts as hung | the watchdog | here, `server/metrics/test_alarms` |
| times of moves | whether blocks are restored | `test_tier` |
| speed of a step's layers | which rows a step leaves out: measured anew in each | `executors/test_shedding` |
| the lowest target of earlier starts | the default target: of the last few starts | `test_step_time_store` |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from evenflow.core.plan import Chunk, ChunkReason, StepResult, StepShape
from evenflow.core.prefill_pace import PrefillPace
from evenflow.core.request import SamplingParams
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from tests.core.driving import Driver
from tests.core.target_load import busy_steps, max_type, start_chats, target_driver
from tests.engine.fakes import fake_engine, prepare

TARGET_MS = 200
WRONG = pytest.mark.parametrize("wrong", [10.0, 0.1])  # what is known, over what is so
MOST_STEPS = 120  # until it is right again


def machine(speed: list[float]) -> Driver:
    """Each step takes `speed` times its usual seconds."""
    return target_driver(TARGET_MS, lambda shape: speed[0] * max_type(shape))


def learned(wrong: float) -> StepTimeModel:
    """From a machine whose steps took this factor longer."""
    driver = machine([wrong])
    start_chats(driver, 8)
    list(busy_steps(driver, 80))
    return driver.scheduler.step_time


def stored(wrong: float) -> StepTimeModel:
    return StepTimeModel.from_record(learned(wrong).to_record())


def prior(wrong: float) -> StepTimeModel:
    right = StepCosts(step=0.010, row=6e-5, attention=1.5e-9, logits=2e-5, context=1.2e-7)
    return StepTimeModel(StepCosts(*[wrong * cost for cost in right[:8]], right.knee, right.launch))


def rate(driver: Driver, steps: int = 60) -> float:
    """Prefill tokens per second beside chats, in steps that keep the target."""
    seen = list(busy_steps(driver, steps))
    assert sorted(step.gap for step in seen)[-2] <= 1.1 * TARGET_MS / 1000
    return sum(step.prefill for step in seen) / sum(step.gap for step in seen)


@cache
def usual_rate() -> float:
    driver = machine([1.0])
    start_chats(driver, 8)
    list(busy_steps(driver, MOST_STEPS))
    return rate(driver)


@pytest.mark.slow
@WRONG
@pytest.mark.parametrize("known", [learned, stored, prior])
def test_wrong_step_times(known: Callable[[float], StepTimeModel], wrong: float) -> None:
    driver = machine([1.0])
    driver.scheduler.prices.step_time = known(wrong)
    start_chats(driver, 8)
    list(busy_steps(driver, MOST_STEPS))
    assert rate(driver) >= 0.9 * usual_rate()


@pytest.mark.slow
@WRONG
def test_step_times_of_a_machine_that_changes_while_it_runs(wrong: float) -> None:
    speed = [wrong]
    driver = machine(speed)
    start_chats(driver, 8)
    list(busy_steps(driver, 80))
    speed[0] = 1.0
    list(busy_steps(driver, MOST_STEPS))
    assert rate(driver) >= 0.9 * usual_rate()


@pytest.mark.slow
def test_a_target_that_was_infeasible() -> None:
    speed = [30.0]
    driver = machine(speed)
    start_chats(driver, 8)
    list(busy_steps(driver, 80))
    assert driver.scheduler.policy.feasible_target is not None
    speed[0] = 1.0
    list(busy_steps(driver, MOST_STEPS))
    assert driver.scheduler.policy.feasible_target is None
    assert rate(driver) >= 0.9 * usual_rate()


@pytest.mark.slow
def test_overheads_that_have_passed() -> None:
    driver = machine([1.0])
    start_chats(driver, 8)
    pause, wait = [0.5], driver.executor.wait  # more than the whole target, outside of the run itself

    def late() -> StepResult:
        result = wait()
        driver.executor.clock.now += pause[0]
        return result

    driver.executor.wait = late  # type: ignore[method-assign]
    list(busy_steps(driver, 40))
    assert driver.scheduler.overhead > 0.4
    pause[0] = 0.0
    list(busy_steps(driver, 40))
    assert driver.scheduler.overhead < 0.001
    assert rate(driver) >= 0.9 * usual_rate()


@WRONG
def test_a_wrong_pace(wrong: float) -> None:
    pace = PrefillPace(lambda start, length: 0.001 * length)

    def observe(step_id: int, times: float) -> None:
        pace.observe(step_id, [Chunk("a", 0, 0, 0, 100, ChunkReason.BUDGET, samples=True)], times * 0.15, 0.05)

    for number in range(1000):
        observe(number, wrong)
    for number in range(1000, 1000 + MOST_STEPS):
        observe(number, 1.0)
    assert pace.seconds(1.0) == pytest.approx(1.5, rel=0.05)


@WRONG
def test_when_a_step_counts_as_hung(wrong: float) -> None:
    """Believed to be quick, a slow step is not taken for a hung one; believed to be slow, a hung one is found later."""
    speed = [wrong]

    def cost(shape: StepShape) -> float:
        return 20 * speed[0] * max_type(shape)

    engine = fake_engine("target:10s", cost=cost)

    def run(num_steps: int) -> None:
        for number in range(num_steps):
            if not engine.has_work:
                engine.add(prepare(engine, [number] * 300, SamplingParams(max_tokens=8)))
            report = engine.step()
            assert report is not None
            assert report.seconds < limits[-1]

    limits: list[float] = [600.0]
    engine.pulse.extend = lambda upper: limits.append(60 + 20 * upper if upper else 660)  # type: ignore[method-assign]
    run(80)
    speed[0] = 1.0
    run(MOST_STEPS)
    assert limits[-1] < 60 + 20 * 2 * 20 * max_type(engine.scheduler.caps.step_shape(num_decodes=1, decode_context=300))
