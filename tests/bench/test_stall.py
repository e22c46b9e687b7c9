"""The stall benchmark in virtual time: what counts, what is compared, and that it is the same every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from evenflow.bench.plots import draw_curves, draw_tokens
from evenflow.bench.stall import StallReport, compare_policies, measure
from evenflow.bench.stall_forecast import forecast_prompts, interval_to_keep_up, prompts_within
from evenflow.bench.stall_load import StallLoad, english_prompts
from evenflow.bench.stall_steps import run_load
from evenflow.config import EngineConfig
from evenflow.core.plan import StepPlan, StepResult, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.report import CauseKind
from evenflow.engine.engine import Engine
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.executors.fake import FakeExecutor, fake_continuation
from tests.engine.fakes import VOCAB, fake_engine

LOAD = StallLoad(
    num_chats=3,
    chat_prompts=[[1] * 5, [2] * 6],
    chat_tokens=20,
    long_prompts=[[10 + number] * 400 for number in range(3)],
    long_answer_tokens=4,
    interval=2.0,
)
POLICIES = ("unchunked", "fixed:40", "target:60ms", "target:20ms", "target:80ms,paced")


def specs(*policies: str) -> list[PolicySpec]:
    return [PolicySpec.parse(policy) for policy in policies]


def cost(shape: StepShape) -> float:
    """At the least 34 ms with 16 tokens of prefill and 3 decodes."""
    return 0.015 + 0.001 * shape.prefill_rows + 0.001 * shape.decode_sequences


def engine(policy: str = "fixed:64") -> Engine:
    return fake_engine(policy, cost=cost, num_blocks=400, max_model_len=1000, enable_prefix_caching=False)


def compare() -> StallReport:
    it = engine()
    feasible = measure(it, LOAD)
    return compare_policies(it, LOAD, specs(*POLICIES), 2, feasible)


def test_a_run_counts_the_gaps_while_a_long_prompt_waits() -> None:
    run = run_load(engine("fixed:103"), LOAD)
    # Each prompt takes four steps of 100 tokens; the chats' prompts that fall among them take some of that.
    assert [chunk.num_tokens for chunk in run.prefills[:4]] == [100] * 4
    assert sum(chunk.num_tokens for chunk in run.prefills) == 1200
    assert run.long_ttft_s[0] == pytest.approx(4 * 0.118)
    counted = [token for token in run.tokens if token.counts]
    assert {round(token.gap, 6) for token in counted[:12]} == {0.118}
    idle = [token for token in run.tokens if not token.counts]
    assert max(token.gap for token in idle) < 0.040  # decodes, and now and then a chat's own prompt
    assert len({token.at for token in counted}) == len(run.prefills)
    assert run.pending_s == pytest.approx(sum(chunk.end - chunk.start for chunk in run.prefills))


def test_long_prompts_arrive_by_the_clock_and_their_wait_for_a_running_step_counts() -> None:
    run = run_load(engine("unchunked"), LOAD)
    starts = [chunk.start for chunk in run.prefills]
    assert [start // 2.0 for start in starts] == [0, 1, 2]
    for number, (start, ttft) in enumerate(zip(starts, run.long_ttft_s, strict=True)):
        assert 0 <= start - 2.0 * number < 0.040
        assert ttft == pytest.approx(start - 2.0 * number + run.prefills[number].end - start)
    assert run.total_s > 4.0 + run.long_ttft_s[2]


def test_chats_are_replaced_and_the_engine_is_left_empty() -> None:
    it = engine("fixed:64")
    decodes = []
    schedule = it.scheduler.schedule

    def watched(now: float) -> StepPlan | None:
        plan = schedule(now)
        assert plan is not None
        decodes.append(len(plan.decodes) + len(plan.chunks))
        return plan

    it.scheduler.schedule = watched  # type: ignore[method-assign]
    run_load(it, LOAD)
    assert not it.has_work
    assert len(decodes) > 150
    assert min(decodes[3:]) >= 3


def test_the_answers_are_those_of_the_prompts() -> None:
    run = run_load(engine("target:50ms"), LOAD)
    assert run.long_answers == [fake_continuation(prompt, 4, VOCAB) for prompt in LOAD.long_prompts]


def test_policies_compared_on_one_engine() -> None:
    comparison = compare()
    assert [figures.policy for figures in comparison.figures] == list(POLICIES)
    assert comparison.feasible_target_s == pytest.approx(0.034, rel=0.5)
    unchunked, fixed, target, infeasible, paced = comparison.figures
    assert [figures.feasible for figures in comparison.figures] == [None, None, True, False, True]
    assert [figures.late_share is None for figures in comparison.figures] == [True, True, False, False, False]
    assert unchunked.tbt_p99_s == pytest.approx(0.418, rel=0.03)
    assert fixed.tbt_p99_s == pytest.approx(0.055, rel=0.03)
    assert 0.040 < target.tbt_p50_s <= target.tbt_p90_s <= 0.060
    assert target.late_share is not None
    assert target.late_share < 0.05  # the first steps of a size that has not run yet
    assert infeasible.late_share is not None
    assert infeasible.late_share > 0.9
    assert paced.tbt_max_s > 0.080
    assert unchunked.long_ttft_p50_s < target.long_ttft_p50_s < infeasible.long_ttft_p50_s
    assert unchunked.prefill_tokens_per_s == pytest.approx(400 / 0.418, rel=0.1)
    assert all(figures.identical_outputs for figures in comparison.figures)
    assert all(figures.step_time_mape < 0.12 for figures in comparison.figures[1:])
    assert unchunked.steps == 6


def test_the_longest_gaps_are_explained_with_a_target_and_without() -> None:
    for figures in compare().figures:
        assert [stall.gap_s for stall in figures.worst] == sorted((s.gap_s for s in figures.worst), reverse=True)
        assert figures.worst[0].gap_s == figures.tbt_max_s
        for stall in figures.worst:
            assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s)
        [first, *_] = figures.worst[0].causes
        if figures.policy == "unchunked":
            assert (first.kind, first.num_tokens) == (CauseKind.PREFILL, 400)


@pytest.mark.slow
def test_the_same_every_time() -> None:
    assert compare().figures == compare().figures


def test_at_the_chosen_interval_every_policy_ends_a_prompt_before_the_next() -> None:
    it = engine()
    policies = specs("unchunked", "fixed:8", "target:60ms")
    measure(it, LOAD)
    load = replace(LOAD, interval=interval_to_keep_up(forecast_prompts(it, LOAD, policies)))
    for policy in policies:
        it.set_policy(EngineConfig(policy=policy).resolve_policy(max_model_len=1000))
        ttfts = run_load(it, load).long_ttft_s
        assert max(ttfts) < load.interval
    assert load.interval < 1.5 * (400 / 5) * (0.015 + 0.008)  # fixed:8 leaves 5 tokens a step to prefill


class ForgetfulExecutor(FakeExecutor):
    """Gives another token where a prompt came in more than one chunk."""

    def wait(self) -> StepResult:
        plan = self._queue[0][0]
        result = super().wait()
        num_decodes = len(plan.decodes)
        tokens = list(result.tokens)
        for place, chunk in enumerate(plan.chunks, start=num_decodes):
            if chunk.samples and chunk.start > 0 and chunk.end == 400:
                tokens[place] = (499,)
        return replace(result, tokens=tuple(tokens))


def test_policies_take_turns_and_each_has_the_whole_load() -> None:
    it, turns = engine(), dict[str, None]()
    comparison = compare_policies(
        *(it, LOAD, specs("fixed:103", "unchunked"), 1, 0.03),
        prompts_per_turn=2,
        on_progress=lambda text: turns.setdefault(text.split(";")[0]),
    )
    assert list(turns) == [
        f"{policy}, {prompts}, run 1 of 1"
        for prompts in ("long prompts 1 to 2", "long prompt 3")
        for policy in ("fixed:103", "unchunked")
    ]
    run, whole = comparison.first_runs["fixed:103"], run_load(engine("fixed:103"), LOAD)
    assert run.long_answers == whole.long_answers
    assert sum(chunk.num_tokens for chunk in run.prefills) == 1200
    assert len(run.long_ttft_s) == 3
    moments = [token.at for token in run.tokens]
    assert moments == sorted(moments)
    assert run.prefills[-1].start > 2.0 + 4 * 0.118  # the third begins when the second has its answer
    assert len({gap.request_id for gap in run.worst}) > 0
    assert run.worst == sorted(run.worst, key=lambda gap: -gap.gap_s)


def test_an_answer_that_differs_is_reported_where_it_begins_to() -> None:
    it = engine("unchunked")
    it.executor = ForgetfulExecutor(vocab_size=VOCAB, cost=cost, clock=it.executor.clock)  # type: ignore[attr-defined]
    figures = compare_policies(it, LOAD, specs("unchunked", "fixed:100"), 1, 0.03).figures
    assert figures[0].identical_outputs
    assert figures[1].divergence is not None
    assert (figures[1].divergence.prompt, figures[1].divergence.token) == (0, 0)


def test_a_forecast_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    it = engine()
    measure(it, LOAD)
    forecast_prompts(it, LOAD, specs("target:20ms"))
    assert caplog.messages == []
    it.set_policy(PolicySpec.parse("target:20ms"))
    run_load(it, LOAD)
    assert "infeasible" in caplog.text


def test_the_time_left_is_as_forecast_and_then_as_the_turns_take() -> None:
    it, lines = engine(), list[str]()
    policies = specs("fixed:103", "unchunked")
    measure(it, LOAD)
    forecast = forecast_prompts(it, LOAD, policies)
    doubled = {policy: 2 * seconds for policy, seconds in forecast.items()}
    began = it.clock()
    compare_policies(it, LOAD, policies, 1, 0.03, prompts_per_turn=1, forecast=doubled, on_progress=lines.append)
    took = it.clock() - began
    turns = {line.split(";")[0]: line for line in reversed(lines)}  # the first line of each
    left = [float(line.split("about ")[1].split(" s")[0]) for line in reversed(turns.values())]
    assert len(left) == 6 < len(lines)
    assert left[0] == pytest.approx(6 * (forecast[policies[0]] + forecast[policies[1]]), abs=1)
    assert left[1:] == sorted(left[1:], reverse=True)
    assert left[1] < took  # the first turn took half of its forecast


def test_a_quick_comparison_has_the_prompts_that_fit() -> None:
    forecast = dict(zip(specs("unchunked", "fixed:64"), (4.0, 6.0), strict=True))
    assert [prompts_within(seconds, forecast, 1, most=3) for seconds in (5, 10, 25, 60)] == [1, 1, 2, 3]
    assert prompts_within(60, forecast, 3, most=3) == 2


@pytest.mark.parametrize(("num_turns", "policies"), [(1, ["unchunked"]), (3, ["unchunked", "fixed:40"])])
def test_an_interrupt_leaves_the_figures_of_what_has_run(num_turns: int, policies: list[str]) -> None:
    turns = set[str]()

    def interrupt(plan: StepPlan) -> None:
        if len(turns) > num_turns:
            raise KeyboardInterrupt

    it = fake_engine("fixed:64", cost=cost, num_blocks=400, max_model_len=1000, disturb=interrupt)

    def note(text: str) -> None:
        turns.add(text.split(";")[0])

    both = specs("unchunked", "fixed:40")
    comparison = compare_policies(it, LOAD, both, 1, 0.03, prompts_per_turn=2, on_progress=note)
    assert [figures.policy for figures in comparison.figures] == policies
    done = comparison.turns
    assert (len(done.results), len(done.turns), done.is_complete) == (num_turns, 4, False)
    assert all(figures.identical_outputs for figures in comparison.figures)


@pytest.mark.parametrize(
    "run",
    [lambda it: measure(it, LOAD), lambda it: compare_policies(it, LOAD, specs("unchunked"), 1, 0.03)],
    ids=["measuring", "the first turn"],
)
def test_an_interrupt_before_the_first_turn_ends_is_one(run: Callable[[Engine], object]) -> None:
    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    it = fake_engine("fixed:64", cost=cost, num_blocks=400, max_model_len=1000, disturb=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(it)


def test_a_step_that_fails_ends_the_run_with_its_error() -> None:
    def disturb(plan: StepPlan) -> None:
        if any(chunk.start > 100 for chunk in plan.chunks):
            raise RuntimeError("no memory")

    it = fake_engine("fixed:64", cost=cost, num_blocks=400, max_model_len=1000, disturb=disturb)
    with pytest.raises(EngineFailed, match="no memory"):
        run_load(it, LOAD)


def test_a_load_needs_chats_and_long_prompts() -> None:
    with pytest.raises(InvalidRequest, match="0 chats"):
        replace(LOAD, num_chats=0)
    with pytest.raises(InvalidRequest, match="0 long prompts"):
        replace(LOAD, long_prompts=[])


def test_english_prompts_have_the_length_asked_for_and_share_no_beginning() -> None:
    chats, long = english_prompts(lambda text: list(text.encode()), 6, 1000)
    assert [len(prompt) for prompt in long] == [1000] * 6
    assert len({bytes(prompt[:16]) for prompt in long}) == 6
    assert bytes(long[0]).endswith(b"Who is the harbour master?")
    assert len(chats) >= 6


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    comparison = compare()
    draw_tokens(tmp_path / "tokens.png", comparison.first_runs, comparison.figures)
    draw_curves(tmp_path / "curves.png", comparison.figures)
    for name in ("tokens.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
