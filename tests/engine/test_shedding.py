"""Steps of a real model that leave out rows: whatever goes is computed later, and the answers are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow import LLM, SamplingParams
from evenflow.core.plan import ChunkReason, ExecutorCaps, Shed, StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.outputs import RequestOutput
from evenflow.executors.base import Executor
from evenflow.executors.fake import FakeExecutor
from evenflow.native.build import library
from tests.models import tiny_llama

needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")

PROMPTS = [[token, *range(token, token + length)] for token, length in ((5, 150), (90, 7), (100, 119), (300, 60))]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)


class Hurried:
    """An executor that is too late in every step, so that it leaves out all that it may."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.caps = executor.caps

    def submit(self, plan: StepPlan) -> None:
        self.executor.submit(replace(plan, most_seconds=0.0 if plan.chunks else None))

    def wait(self) -> object:
        return self.executor.wait()

    def close(self) -> None:
        self.executor.close()


def hurry(llm: LLM) -> list[StepReport]:
    """Have its steps shed rows; returns the reports of those to come."""
    engine, reports = llm.engine, list[StepReport]()
    engine.executor = Hurried(engine.executor)  # type: ignore[assignment]
    observe = engine.stats.observe

    def remember(report: StepReport) -> None:
        reports.append(report)
        observe(report)

    engine.stats.observe = remember  # type: ignore[method-assign]
    return reports


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def logprobs(output: RequestOutput) -> list[float]:
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    return [row.chosen.logprob for row in (*output.prompt_logprobs, *output.logprobs)]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["unchunked", "fixed:100", "target:50ms"])
def test_answers_and_logprobs_are_the_same(policy: str, caching: bool) -> None:
    with LLM(tiny_llama(), policy="unchunked", enable_prefix_caching=False) as llm:
        expected = llm.generate(PROMPTS, SAMPLING)
    with LLM(tiny_llama(), policy=policy, enable_prefix_caching=caching) as llm:
        reports = hurry(llm)
        found = llm.generate(PROMPTS, SAMPLING)
        again = llm.generate(PROMPTS, replace(SAMPLING, prompt_logprobs=None))  # with caching, their prefixes are there
    assert tokens(found) == tokens(again) == tokens(expected)
    for one, other in zip(found, expected, strict=True):
        assert logprobs(one) == pytest.approx(logprobs(other), abs=1e-4)
    chunks = [chunk for report in reports for chunk in report.chunks]
    shed = [chunk for chunk in chunks if chunk.reason is ChunkReason.SHED]
    assert len(shed) >= 5
    assert not any(chunk.gave_token for chunk in shed)
    computed = [(chunk.start, chunk.length) for chunk in chunks if chunk.request_id == chunks[0].request_id]
    assert [start for start, _ in computed] == [sum(length for _, length in computed[:n]) for n in range(len(computed))]


def test_each_chunk_is_given_the_seconds_of_the_rows_that_its_layers_computed() -> None:
    def shed(plan: StepPlan) -> dict[int, Shed]:
        first = len(plan.decodes)
        is_last = [chunk.length for chunk in plan.chunks] == [100, 100]
        return {first: Shed(40, 80), first + 1: Shed(1, 40)} if is_last else {}

    caps = ExecutorCaps(sheds_rows=True)
    config = SchedulerConfig(num_blocks=100, block_size=16, policy=PolicySpec.parse("target:1000ms"))
    executor = FakeExecutor(caps=caps, cost=lambda shape: 0.001 * shape.total_rows, shed=shed)
    limits = Limits(max_model_len=1000, vocab_size=1000)
    engine = Engine(Scheduler(config, caps), executor, limits, clock=executor.clock)
    intake = Intake(limits, config.block_size, clock=executor.clock)
    for first, length in enumerate((20, 30, 60, 120, 100, 100)):
        engine.add(intake.prepare([first] * length, SamplingParams(max_tokens=50), policy=engine.policy))
        if length != 100:
            for _ in range(3):
                engine.step()
    report = engine.step()
    assert report is not None
    assert [(chunk.length, chunk.num_shed) for chunk in report.chunks] == [(40, 60), (1, 99)]
    assert [chunk.seconds for chunk in report.chunks] == pytest.approx([0.08, 0.04], rel=0.05)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_same(pooling: str) -> None:
    sampling = SamplingParams(max_tokens=1, pooling=pooling)  # type: ignore[arg-type]
    with LLM(tiny_llama(), policy="unchunked", enable_prefix_caching=False) as llm:
        expected = [one.embedding for one in llm.generate(PROMPTS, sampling)]
        assert hurry(llm) == []
        for found, other in zip(llm.generate(PROMPTS, sampling), expected, strict=True):
            assert found.embedding == pytest.approx(other, abs=1e-4)


@needs_kernels
def test_steps_in_fixed_order_run_all_layers_at_once_and_shed_nothing() -> None:
    with LLM(tiny_llama(), policy="target:50ms", deterministic=True) as llm:
        assert not llm.engine.scheduler.caps.sheds_rows


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_is_planned_behind_one_that_may_shed_rows(depth: int) -> None:
    with LLM(tiny_llama(), policy="target:50ms", max_steps_in_flight=depth) as llm:
        assert llm.engine.scheduler.caps.sheds_rows == (depth == 1)
