"""Another target while the engine runs, and requests that bring their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from evenflow.core.plan import StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.request import SamplingParams
from evenflow.engine.engine import Engine
from evenflow.engine.llm import LLM
from evenflow.errors import InvalidConfig, InvalidRequest
from evenflow.executors.recorded import replay
from tests.engine.fakes import fake_async_llm, fake_engine, fake_llm, prepare
from tests.models import tiny_llama


def cost(shape: StepShape) -> float:
    return 0.010 + 0.001 * shape.prefill_rows


def busy_engine(policy: str, **settings: object) -> Engine:
    """Two streams and a prompt too long to end here; the step-time model knows the cost."""
    engine = fake_engine(policy, cost=cost, num_blocks=2000, max_model_len=20_000, **settings)  # type: ignore[arg-type]
    for number in range(2):
        engine.add(prepare(engine, [number] * 10, SamplingParams(max_tokens=5000)))
    engine.step()
    engine.add(prepare(engine, [5] * 19_000, SamplingParams(max_tokens=1), request_id="long"))
    for _ in range(40):
        engine.step()
    return engine


def next_gap(engine: Engine) -> float:
    """Seconds of a step in which no token is late."""
    before = engine.clock()
    report = engine.step()
    assert report is not None
    assert report.late == []
    return engine.clock() - before


def test_the_very_next_step_keeps_the_new_target_and_what_was_learned_stays() -> None:
    engine = busy_engine("target:100ms")
    learned = engine.scheduler.step_time
    for milliseconds in (50, 200, 30, 100):
        engine.set_target(milliseconds / 1000)
        gap = next_gap(engine)
        assert 0.5 * milliseconds / 1000 < gap <= milliseconds / 1000
    assert engine.scheduler.step_time is learned


def test_a_target_after_a_policy_without_one_starts_with_a_clean_slate() -> None:
    engine = busy_engine("target:100ms")
    engine.set_policy(PolicySpec("fixed", 500))
    for _ in range(3):
        engine.step()
    engine.set_target(0.050)
    assert engine.policy.budget == 8192
    for _ in range(5):
        next_gap(engine)


def test_the_budget_and_the_mode_stay_unless_they_are_changed() -> None:
    engine = fake_engine("fixed:64")
    engine.set_policy(PolicySpec.parse("target:80ms,paced").bounded(4096))
    engine.set_target(0.060)
    assert (str(engine.policy), engine.policy.budget) == ("target:60ms,paced", 4096)
    engine.set_target(0.060, paced=False)
    assert str(engine.policy) == "target:60ms"


@pytest.mark.parametrize("settings", [{}, {"policy": "load"}, {"tbt_target": 0.05}])
def test_the_setting_of_the_budget_outlasts_every_change(settings: dict[str, Any]) -> None:
    with LLM(tiny_llama(), max_num_batched_tokens=48, **settings) as llm:
        for change in (0.1, None, 0.2, "load", "unchunked", None, 0.3, None):
            if isinstance(change, str):
                llm.set_policy(change)
            else:
                llm.set_target(change)
            assert llm.policy == "unchunked" or llm.engine.scheduler.policy.max_step_tokens == 48


def test_a_target_may_be_a_fraction_of_a_millisecond_and_may_be_taken_back() -> None:
    engine = fake_engine("load")
    engine.set_target(0.0025)
    assert (str(engine.policy), engine.policy.target) == ("target:2.5ms", 0.0025)
    engine.set_target(0.0005)
    assert str(engine.policy) == "target:0.5ms"
    engine.set_target(None)
    assert (str(engine.policy), engine.policy.target) == ("load", None)

    engine = fake_engine("target:80ms")
    engine.set_target(None)
    assert str(engine.policy) == "fixed:2048"


def test_without_its_target_nothing_is_late_any_more() -> None:
    engine = busy_engine("target:100ms")
    engine.set_target(0.012)
    reports = [engine.step() for _ in range(3)]
    assert any(report is not None and report.late for report in reports)
    engine.set_target(None)
    for _ in range(3):
        next_gap(engine)


@pytest.mark.parametrize("seconds", [0, -1.0, 0.00001, float("nan"), float("inf"), "50", 50])
def test_no_target_but_a_positive_one(seconds: float | str) -> None:
    engine = fake_engine("target:80ms")
    with pytest.raises(InvalidConfig, match="tbt_target="):
        engine.set_target(seconds)
    assert str(engine.policy) == "target:80ms"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_recording_with_changes_of_target_can_be_planned_again(depth: int, tmp_path: Path) -> None:
    engine = busy_engine("target:100ms", depth=depth, record=tmp_path / "steps.jsonl")
    for seconds in (0.05, 0.2):
        engine.set_target(seconds)
        for _ in range(5):
            engine.step()
    for request_id in list(engine.scheduler.requests):
        engine.abort(request_id)
    engine.step()
    engine.close()
    assert len(replay(tmp_path / "steps.jsonl")) >= 50


def test_a_request_with_a_target_needs_the_policy_that_keeps_it() -> None:
    llm = fake_llm("fixed:64")
    for name in ("tbt_target", "ttft_target"):
        sampling = SamplingParams(**{name: 0.25})  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=rf"{name}=0.25 .*'fixed:64'"):
            llm.prepare([1, 2, 3], sampling)
    llm.set_target(0.1)
    llm.prepare([1, 2, 3], SamplingParams(tbt_target=0.25, ttft_target=1.0))


def test_llm_and_async_llm_say_which_policy_holds() -> None:
    with LLM(tiny_llama(), policy="fixed:64", enable_prefix_caching=False) as llm:
        llm.set_target(0.5)
        assert llm.policy == "target:500ms"
        [output] = llm.generate([list(range(3, 90))], SamplingParams(temperature=0.0, max_tokens=2))
        assert len(output.token_ids) == 2

    async def main() -> list[str]:
        engine = fake_engine("target:100ms,paced")
        async with fake_async_llm(engine) as llm:
            policies = [llm.policy]
            for paced in (None, False):
                llm.set_target(0.04, paced)
                await llm.generate([1, 2, 3], SamplingParams(max_tokens=1))
                policies.append(str(engine.policy))
                assert llm.policy == policies[-1]
            with pytest.raises(InvalidConfig):
                llm.set_target(0.0)
        return policies

    assert asyncio.run(main()) == ["target:100ms,paced", "target:40ms,paced", "target:40ms"]
