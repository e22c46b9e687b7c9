"""Rules of other engines, as literal traces: the rows of each step of a small load."""

from __future__ import annotations

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec, policy_kinds
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.simulation.devices import Ran
from evenflow.simulation.own_engine import OwnEngine
from evenflow.simulation.rules import other_rules

LOAD = (("a", 30, 9), ("b", 250, 2), ("c", 80, 2))  # prompt and answer
Step = tuple[int, dict[str, int]]  # decodes, and the chunks of prompts


def trace(policy: str, budget: int = 100, answer_of_a: int = 9) -> list[Step]:
    """`b` and `c` arrive when `a` has a token."""
    with other_rules():
        spec = PolicySpec.parse(policy).bounded(budget)
        engine = OwnEngine(Scheduler(SchedulerConfig(num_blocks=1000, policy=spec), ExecutorCaps()))
    steps: list[Step] = []
    for number, (name, prompt, answer) in enumerate(LOAD):
        sampling = SamplingParams(max_tokens=answer if number else answer_of_a, ignore_eos=True)
        request = Request(name, [number] * prompt, sampling, seed=0, max_model_len=10_000, arrival_time=float(number))
        engine.scheduler.add(request)
        if number == 0:
            run(engine, steps, 1)
    run(engine, steps, 100)
    return steps


def run(engine: OwnEngine, steps: list[Step], count: int) -> None:
    for _ in range(count):
        if not engine.scheduler.requests:
            return
        work = engine.schedule(float(len(steps)))
        assert work is not None
        [plan] = engine.scheduler.plans_in_flight
        steps.append((work.num_decodes, {chunk.request_id: chunk.length for chunk in plan.chunks}))
        engine.commit(Ran(0.010 if not work.chunks else 0.050), float(len(steps)))


def test_vllm_decodes_first_and_fills_the_budget_in_order() -> None:
    assert trace("vllm:100") == [
        (0, {"a": 30}),
        (1, {"b": 99}),
        (1, {"b": 99}),
        (1, {"b": 52, "c": 47}),
        (2, {"c": 33}),
        (2, {}),
        (1, {}),
        (1, {}),
        (1, {}),
    ]


def test_vllms_interval_holds_prompts_back_while_streams_decode() -> None:
    steps = trace("vllm-interval:3")
    assert steps[:4] == [(0, {"a": 30}), (1, {}), (1, {"b": 99}), (1, {})]
    assert all(number % 3 == 0 or not decodes for number, (decodes, chunks) in enumerate(steps, 1) if chunks)


def test_sglang_computes_prompts_before_anything_decodes() -> None:
    assert trace("sglang:100") == [
        (0, {"a": 30}),
        (0, {"b": 100}),
        (0, {"b": 100}),
        (0, {"b": 50, "c": 50}),
        (0, {"c": 30}),
        (3, {}),
        *[(1, {})] * 7,
    ]


def test_sglang_mixed_is_a_budget_for_both() -> None:
    assert trace("sglang-mixed:100")[:4] == [(0, {"a": 30}), (1, {"b": 99}), (1, {"b": 99}), (1, {"b": 52, "c": 47})]


def test_sglangs_interval_lets_streams_decode_between_prompts() -> None:
    assert trace("sglang-interval:2")[:7] == [
        (0, {"a": 30}),
        (1, {}),
        (1, {}),
        (0, {"b": 100}),
        (1, {}),
        (1, {}),
        (0, {"b": 100}),
    ]


def test_a_share_of_the_time() -> None:
    """Steps with prompts take five times as long: at 50% there are five decode steps for each."""
    steps = trace("prefill-share:50", budget=50, answer_of_a=80)
    waiting = steps[1 : max(number for number, (_, chunks) in enumerate(steps) if chunks)]
    assert sum(bool(chunks) for _, chunks in waiting) / len(waiting) == pytest.approx(1 / 6, abs=0.05)
    assert not any(decodes and chunks for decodes, chunks in steps)
    assert sum(chunks.get("b", 0) for _, chunks in steps) == 250


def test_they_are_there_only_while_the_block_runs() -> None:
    before = list(policy_kinds())
    with other_rules():
        assert PolicySpec.parse("vllm:100").kind.name == "vllm"
    assert list(policy_kinds()) == before
