"""The demo's load in virtual time: who arrives when, what pauses, and what is compared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow.bench.demo import FIXED_POLICY, DemoRuns, compare_policies
from evenflow.bench.demo_run import DemoPrompt, DemoRunner
from evenflow.bench.timeline import Timeline
from evenflow.core.plan import StepPlan, StepResult, StepShape
from evenflow.engine.engine import Engine
from evenflow.errors import EngineFailed
from evenflow.executors.fake import FakeExecutor, fake_continuation
from tests.engine.fakes import VOCAB, NumberCodec, fake_engine

NAMES = ["large_1", "small_1", "small_2", "small_3", "large_2"]


def prompt(number: int, length: int, max_tokens: int) -> DemoPrompt:
    size = "large" if length > 100 else "small"
    return DemoPrompt(NAMES[number], size, [10 + number] * length, length, max_tokens)  # type: ignore[arg-type]


PROMPTS = [
    prompt(0, 2000, 8),
    prompt(1, 5, 48),
    prompt(2, 6, 48),
    prompt(3, 7, 48),
    prompt(4, 1500, 8),
]


def cost(shape: StepShape) -> float:
    return 0.015 + 0.001 * shape.prefill_rows + 0.001 * shape.decode_sequences


def engine(policy: str = "target:100ms") -> Engine:
    return fake_engine(policy, cost=cost, num_blocks=600, max_model_len=4000)


def runner(it: Engine) -> DemoRunner:
    return DemoRunner(it, NumberCodec())


def compare(policy: str = "target:100ms", end_by: float | None = None) -> DemoRuns:
    return compare_policies(runner(engine(policy)), PROMPTS, end_by)


def test_the_target_ends_the_pause_and_the_cost_is_stated() -> None:
    comparison = compare()
    assert [run.policy for run in comparison.runs] == ["unchunked", "fixed:512", "target:100ms"]
    unchunked, fixed, chunked = comparison.runs
    # large_2 arrives while the small answers are decoded, and its 1,500 tokens take 1.5 seconds in one piece.
    assert unchunked.longest_gap_s == pytest.approx(1.5, rel=0.02)
    assert 0.4 < fixed.longest_gap_s < 0.6
    assert chunked.longest_gap_s < 0.11
    assert chunked.mean_latency_s("small") < unchunked.mean_latency_s("small")
    assert unchunked.mean_ttft_s("small") == pytest.approx(2.033, rel=0.01)  # large_1 and the small ones, in one step
    assert chunked.mean_ttft_s("small") < 0.3
    assert comparison.same_text
    assert unchunked.answers[1].text.split() == list(map(str, fake_continuation([11] * 5, 48, VOCAB)))
    pause, price = comparison.verdict().splitlines()
    assert pause.startswith(
        f"Longest pause of a stream between two tokens: {unchunked.longest_gap_s:.2f} s unchunked, "
    )
    assert f" {chunked.longest_gap_s:.2f} s with target:100ms (" in pause
    assert pause.endswith("times shorter).")
    assert f"took {chunked.total_s:.1f} s instead of {unchunked.total_s:.1f} s" in price
    assert "more" in price
    assert "the answers are the same" in comparison.gain()


def test_a_ratio_near_one_is_about_the_same() -> None:
    unchunked = compare().unchunked
    answers = [replace(one, ttft_s=0.97 * one.ttft_s, latency_s=1.03 * one.latency_s) for one in unchunked.answers]
    gain = DemoRuns(unchunked, None, replace(unchunked, answers=tuple(answers))).gain()
    assert gain.count("(about the same)") == 3
    assert "1.0 times" not in gain


def test_a_missed_target_is_said() -> None:
    comparison = compare()
    late = replace(comparison, chunked=replace(comparison.unchunked, policy="target:100ms"))
    assert "3 gaps of 155 went over the target by more than 10%: steps took longer" in late.verdict()


def test_the_last_prompt_arrives_after_the_same_time_in_each_run() -> None:
    comparison = compare()
    small = list(comparison.unchunked.timeline.streams.values())[1:4]
    arrival_s = comparison.unchunked.last_arrival_s
    for stream in small:
        assert 12 <= sum(at <= arrival_s for at in stream.tokens) < 48
    assert [run.last_arrival_s for run in comparison.runs] == pytest.approx([arrival_s] * 3)
    for run in comparison.runs:
        large_2 = run.timeline.streams[f"{run.policy}/large_2"]
        assert large_2.arrived == pytest.approx(arrival_s)
        assert large_2.tokens[-1] - arrival_s == pytest.approx(run.answers[-1].latency_s)


def test_the_last_prompt_does_not_wait_for_an_idle_engine() -> None:
    run = runner(engine()).run(PROMPTS, "late", last_arrival_s=1000.0)
    assert [answer.finish_place for answer in run.answers][-1] == 5
    assert run.total_s < 20
    assert run.last_arrival_s < 20


def test_a_run_finds_nothing_of_another_in_the_prefix_cache() -> None:
    it = engine()
    compare_policies(runner(it), PROMPTS)
    warm_up = len(PROMPTS[1].token_ids)
    assert it.stats.totals.prefill_tokens == 3 * sum(len(one.token_ids) for one in PROMPTS) + warm_up


def test_each_run_can_be_watched_from_its_beginning() -> None:
    seen: list[Timeline] = []
    compare_policies(DemoRunner(engine(), NumberCodec(), seen.append), PROMPTS)
    assert [timeline.title for timeline in seen] == ["unchunked", "fixed:512", "target:100ms"]
    assert all(timeline.is_finished for timeline in seen)


@pytest.mark.parametrize("policy", ["fixed:64", "fixed:512"])
def test_a_fixed_policy_is_compared_with_no_other(policy: str) -> None:
    comparison = compare(policy)
    assert [run.policy for run in comparison.runs] == ["unchunked", policy]
    assert comparison.chunked.policy == policy


def test_the_fixed_chunk_is_left_out_for_lack_of_time() -> None:
    seconds = compare().unchunked.total_s
    in_time, late = (compare(end_by=factor * seconds) for factor in (4, 3))
    assert in_time.fixed is not None
    assert in_time.fixed.policy == str(FIXED_POLICY)
    assert late.fixed is None
    assert [run.policy for run in late.runs] == ["unchunked", "target:100ms"]


class ForgetfulExecutor(FakeExecutor):
    """Gives another token where a prompt came in more than one chunk."""

    def wait(self) -> StepResult:
        plan = self._queue[0][0]
        result = super().wait()
        tokens = list(result.tokens)
        for place, chunk in enumerate(plan.chunks, start=len(plan.decodes)):
            if chunk.samples and chunk.start > 0:
                tokens[place] = (499,)
        return replace(result, tokens=tuple(tokens))


def test_answers_that_differ_are_said_to_differ() -> None:
    it = engine()
    it.executor = ForgetfulExecutor(vocab_size=VOCAB, cost=cost, clock=it.executor.clock)  # type: ignore[attr-defined]
    comparison = compare_policies(runner(it), PROMPTS)
    assert not comparison.same_text
    assert "some answers differ" in comparison.gain()


def test_a_step_that_fails_ends_the_demo_with_its_error_and_an_idle_engine() -> None:
    def disturb(plan: StepPlan) -> None:
        if any(chunk.start > 100 for chunk in plan.chunks):
            raise RuntimeError("no memory")

    it = fake_engine("fixed:64", cost=cost, num_blocks=600, max_model_len=4000, disturb=disturb)
    with pytest.raises(EngineFailed, match=r"large_1: no memory"):
        runner(it).run(PROMPTS, "fixed:64")
    assert not it.has_work
