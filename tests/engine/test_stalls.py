"""Late tokens are explained: by causes that are there, in seconds that add up to the gap."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable

import pytest

from evenflow.core.plan import StepPlan, StepShape
from evenflow.core.report import CauseKind, Stall
from evenflow.core.request import SamplingParams
from evenflow.core.rule_policies import Unchunked
from evenflow.engine.engine import Engine
from evenflow.engine.gc_timer import GcTimer
from evenflow.executors.fake import VirtualClock
from tests.engine.fakes import fake_engine, prepare


def cost(shape: StepShape) -> float:
    return 0.010 + 0.001 * shape.prefill_rows + 0.0005 * shape.decode_sequences


def chatting_engine(
    policy: str = "target:40ms",
    *,
    cost: Callable[[StepShape], float] = cost,
    disturb: Callable[[StepPlan], None] = lambda plan: None,
    num_blocks: int = 400,
    warm_up: int = 60,
) -> Engine:
    """Three streams, and a step-time model that has seen prefill beside them."""
    engine = fake_engine(policy, cost=cost, disturb=disturb, num_blocks=num_blocks, max_model_len=3000)
    for number in range(3):
        prompt = [number] * (10 + number)
        engine.add(prepare(engine, prompt, SamplingParams(max_tokens=2000), request_id=f"chat-{number}"))
    for number in range(warm_up):
        if number % 10 == 5:
            engine.add(prepare(engine, [100 + number] * (40 + number), SamplingParams(max_tokens=1)))
        engine.step()
    return engine


def passes(engine: Engine, seconds: float) -> None:
    assert isinstance(engine.clock, VirtualClock)
    engine.clock.now += seconds


def next_stall(engine: Engine) -> Stall:
    report = engine.step()
    assert report is not None
    assert report.stall is not None
    return report.stall


def seconds_of(stall: Stall, kind: CauseKind) -> float:
    return sum(cause.seconds for cause in stall.causes if cause.kind is kind)


def test_tokens_in_time_leave_no_trace() -> None:
    engine = chatting_engine()
    for _ in range(20):
        report = engine.step()
        assert report is not None
        assert (report.late, report.stall) == ([], None)


def test_a_prefill_over_the_target_is_named_with_what_it_cost() -> None:
    engine = chatting_engine()
    for name, length in (("big", 100), ("small", 20)):
        engine.add(prepare(engine, [length] * length, SamplingParams(max_tokens=1), request_id=name))
    engine.scheduler.policy.plan = Unchunked(10_000).plan  # type: ignore[method-assign]
    stall = next_stall(engine)
    assert stall.num_late_streams == 3
    assert stall.gap_s == pytest.approx(0.010 + 0.120 + 0.0015)
    assert stall.late_s == pytest.approx(stall.gap_s - 0.040)
    assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s)
    chunks = {cause.request_id: cause for cause in stall.causes if cause.kind is CauseKind.PREFILL}
    assert {name: cause.num_tokens for name, cause in chunks.items()} == {"big": 100, "small": 20}
    assert chunks["big"].seconds == pytest.approx(0.100, rel=0.1)
    assert chunks["small"].seconds == pytest.approx(0.020, rel=0.1)
    assert seconds_of(stall, CauseKind.DECODES) == pytest.approx(0.0115, rel=0.2)
    assert stall.causes[0] == chunks["big"]
    assert seconds_of(stall, CauseKind.PREFILL) == pytest.approx(0.120, rel=0.1)


def test_a_step_slower_than_predicted_is_unexplained() -> None:
    slow = [1.0]
    engine = chatting_engine(cost=lambda shape: slow[0] * cost(shape))
    slow[0] = 10.0
    stall = next_stall(engine)
    assert seconds_of(stall, CauseKind.UNEXPLAINED) == pytest.approx(9 * 0.0115, rel=0.05)
    assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s) == pytest.approx(0.115)


def test_time_between_steps_is_the_hosts() -> None:
    engine = chatting_engine()
    passes(engine, 0.100)
    stall = next_stall(engine)
    assert seconds_of(stall, CauseKind.HOST) == pytest.approx(0.100)
    assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s)


def test_garbage_collection_is_told_apart_in_a_step_and_between_steps() -> None:
    extra = [0.0]
    engine = chatting_engine(cost=lambda shape: cost(shape) + extra[0])

    passes(engine, 0.070)
    engine.gc_timer.seconds += 0.050
    between = next_stall(engine)
    extra[0] = 0.090
    engine.gc_timer.seconds += 0.060
    within = next_stall(engine)

    assert seconds_of(between, CauseKind.GARBAGE_COLLECTION) == pytest.approx(0.050)
    assert seconds_of(between, CauseKind.HOST) == pytest.approx(0.020, rel=1e-3)
    assert seconds_of(within, CauseKind.GARBAGE_COLLECTION) == pytest.approx(0.060)
    assert seconds_of(within, CauseKind.UNEXPLAINED) == pytest.approx(0.030, rel=0.1)
    for stall in (within, between):
        assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s)


def test_the_timer_hears_of_real_collections_while_it_is_held() -> None:
    gc.collect()  # engines of other tests hold timers too
    ticks = iter(range(100))
    timer = GcTimer(lambda: next(ticks))
    before = len(gc.callbacks)
    gc.collect()
    assert timer.seconds == 1
    del timer
    assert len(gc.callbacks) == before - 1


def test_a_stream_without_a_block_waits_for_memory() -> None:
    engine = fake_engine("target:40ms", cost=cost, num_blocks=13, max_model_len=200)
    for number in range(3):
        engine.add(prepare(engine, [number] * 20, SamplingParams(max_tokens=100)))
    stalls = []
    while (report := engine.step()) is not None:
        stalls += [report.stall] if report.stall is not None else []
    memory = [stall for stall in stalls if seconds_of(stall, CauseKind.KV_MEMORY)]
    assert memory
    for stall in memory:
        assert sum(cause.seconds for cause in stall.causes) == pytest.approx(stall.gap_s)


def test_every_stall_is_reported_with_its_own_causes() -> None:
    engine = chatting_engine()
    for number in range(60):
        wait = 0.050 + 0.001 * (17 * number % 60)
        passes(engine, wait)
        stall = next_stall(engine)
        assert seconds_of(stall, CauseKind.HOST) == pytest.approx(wait)
        assert stall.num_late_streams == 3


def test_a_target_that_cannot_be_kept_is_said_once_with_one_that_can(caplog: pytest.LogCaptureFixture) -> None:
    engine = chatting_engine()
    with caplog.at_level(logging.WARNING, "evenflow"):
        engine.set_target(0.010)
        engine.add(prepare(engine, [9] * 2000, SamplingParams(max_tokens=1)))
        for _ in range(60):
            engine.step()
        assert not caplog.records  # it may pass
        for _ in range(40):
            engine.step()
    [message] = [record.getMessage() for record in caplog.records]
    assert "target:10ms" in message
    [numbers] = re.findall(r"The lowest feasible target is estimated at ([\d.]+(?: to [\d.]+)?) ms", message)
    feasible = float(numbers.split(" to ")[-1])
    assert 27 <= feasible <= 60  # 10 ms a step, 16 tokens of prefill, 3 decodes, and the model's margin

    caplog.clear()
    with caplog.at_level(logging.WARNING, "evenflow"):
        engine.set_target(feasible / 1000 + 0.005)
        while engine.scheduler.num_running > 3:
            engine.step()
    assert not caplog.records


def test_steps_that_fail_explain_nothing() -> None:
    broken = [False]

    def disturb(plan: StepPlan) -> None:
        if broken[0]:
            raise RuntimeError("lost")

    engine = chatting_engine(disturb=disturb)
    broken[0] = True
    report = engine.step()
    assert report is not None
    assert report.stall is None
