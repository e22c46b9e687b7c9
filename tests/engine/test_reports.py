"""A report describes a step as it ran: what was computed, which requests got tokens, and where the time went."""

from __future__ import annotations

import msgspec
import pytest

from evenflow.core.report import StepReport
from tests.server.stepping import SteppedEngine, step_seconds


def test_chunks_and_decodes_are_stepped_as_they_ran() -> None:
    stepped = SteppedEngine("fixed:32")
    stepped.add("chat", 10, max_tokens=6)
    first = stepped.step()
    assert [(chunk.start, chunk.length, chunk.reason, chunk.gave_token) for chunk in first.chunks] == [
        (0, 10, "end_of_prompt", True)
    ]
    assert (first.decoded, first.num_output_tokens, first.num_decodes) == ([], 1, 0)
    assert [(a.request_id, a.num_tokens, a.num_cached_tokens, a.was_preempted) for a in first.admissions] == [
        ("chat", 10, 0, False)
    ]
    stepped.add("long", 50, token=2)
    second = stepped.step()
    assert second.decoded == ["chat"]
    assert [(chunk.request_id, chunk.length, chunk.reason, chunk.gave_token) for chunk in second.chunks] == [
        ("long", 31, "budget", False)
    ]
    assert (second.budget, second.num_prefill_tokens, second.num_output_tokens) == (32, 31, 1)
    assert (second.step_id, second.seconds) == (1, pytest.approx(0.010 + 0.031 + 0.0005))
    assert second.at == stepped.clock()
    assert second.started_at == pytest.approx(first.at)
    assert (second.num_running, second.num_waiting) == (2, 0)


def test_the_parts_of_a_step_add_up_and_tell_decodes_from_prefill() -> None:
    stepped = SteppedEngine("fixed:64", max_model_len=3000, num_blocks=2000)
    stepped.add("chat", 10, max_tokens=400)
    mixed: StepReport | None = None
    for number in range(60):
        stepped.add(f"prompt-{number}", 7 + 3 * number, max_tokens=1, token=2 + number)
        for report in (stepped.step(), stepped.step()):
            parts = [report.decode_seconds, *(chunk.seconds for chunk in report.chunks)]
            assert sum(parts) == pytest.approx(report.seconds)
            assert min(parts) >= 0
            mixed = report if report.chunks and report.num_decodes else mixed
    assert mixed is not None
    assert mixed.chunks[0].seconds == pytest.approx(0.001 * mixed.chunks[0].length, rel=0.1)
    assert mixed.predicted_seconds == pytest.approx(mixed.seconds, rel=0.1)


def test_a_step_without_decodes_is_all_prefill() -> None:
    stepped = SteppedEngine()
    stepped.add("only", 30)
    assert stepped.step().decode_seconds == 0


def test_a_prefix_hit_and_a_preemption_are_stepped_with_the_admission() -> None:
    stepped = SteppedEngine(num_blocks=9, max_num_seqs=2, max_model_len=140)
    stepped.add("a", 40, max_tokens=60)
    stepped.add("b", 40, max_tokens=60)
    admissions = [admission for report in stepped.steps() for admission in report.admissions]
    assert [(a.request_id, a.was_preempted) for a in admissions] == [("a", False), ("b", False), ("b", True)]
    assert admissions[1].num_cached_tokens == 32
    assert admissions[2].num_tokens > 40


def test_a_late_token_comes_with_its_stall() -> None:
    slow_steps: list[int] = []

    stepped = SteppedEngine("target:40ms", cost=lambda shape: 0.9 if slow_steps else step_seconds(shape))
    stepped.add("chat", 10, max_tokens=20)
    stepped.step()
    in_time = stepped.step()
    assert (in_time.stall, in_time.late, in_time.target_s) == (None, [], 0.04)
    slow_steps.append(1)
    late = stepped.step()
    assert len(late.late) == 1
    assert late.stall is not None
    assert (late.stall.request_id, late.stall.gap_s) == ("chat", pytest.approx(0.9))
    assert sum(cause.seconds for cause in late.stall.causes) == pytest.approx(0.9)
    assert late.stall.causes[0].kind == "unexplained"
    slow_steps.clear()
    assert stepped.step().stall is None


def test_requests_that_were_aborted_meanwhile_gave_nothing() -> None:
    stepped = SteppedEngine(depth=2)
    stepped.add("stays", 10)
    stepped.add("goes", 10, token=2)
    stepped.step()
    stepped.engine.abort("goes")
    report = stepped.step()
    assert report.num_decodes == 2
    assert (report.decoded, report.num_output_tokens) == (["stays"], 1)


def test_a_policy_without_target_says_so() -> None:
    stepped = SteppedEngine("fixed:64")
    stepped.add("chat", 10)
    report = stepped.step()
    assert (report.policy, report.target_s, report.feasible_target_s) == ("fixed:64", None, None)


def test_reports_cross_a_process_border_unchanged() -> None:
    stepped = SteppedEngine("target:11ms")
    stepped.add("chat", 10)
    stepped.add("long", 300, token=2)
    for report in stepped.steps():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=StepReport) == report
