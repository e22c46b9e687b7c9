"""An event tells a step as it was: who computed what, who got tokens, and where the seconds went."""

from __future__ import annotations

import msgspec
import pytest

from evenflow.server.metrics.events import StepEvent
from tests.server.stepping import ToldEngine, step_seconds


def test_chunks_and_decodes_are_told_as_they_ran() -> None:
    told = ToldEngine("fixed:32")
    told.add("chat", 10, max_tokens=6)
    first = told.step()
    assert [(chunk.start, chunk.length, chunk.reason, chunk.gave_token) for chunk in first.chunks] == [
        (0, 10, "end_of_prompt", True)
    ]
    assert (first.decoded, first.num_output_tokens, first.num_decodes) == ([], 1, 0)
    assert [(a.request_id, a.num_tokens, a.num_cached_tokens, a.was_preempted) for a in first.admissions] == [
        ("chat", 10, 0, False)
    ]
    told.add("long", 50, token=2)
    second = told.step()
    assert second.decoded == ["chat"]
    assert [(chunk.request_id, chunk.length, chunk.reason, chunk.gave_token) for chunk in second.chunks] == [
        ("long", 31, "budget", False)
    ]
    assert (second.budget, second.num_prefill_tokens, second.num_output_tokens) == (32, 31, 1)
    assert (second.step_id, second.seconds) == (1, pytest.approx(0.010 + 0.031 + 0.0005))
    assert second.at == told.clock()
    assert second.started_at == pytest.approx(first.at)
    assert (second.num_running, second.num_waiting) == (2, 0)


def test_the_parts_of_a_step_add_up_and_tell_decodes_from_prefill() -> None:
    told = ToldEngine("fixed:64", max_model_len=3000, num_blocks=2000)
    told.add("chat", 10, max_tokens=400)
    mixed: StepEvent | None = None
    for number in range(60):
        told.add(f"prompt-{number}", 7 + 3 * number, max_tokens=1, token=2 + number)
        for event in (told.step(), told.step()):
            parts = [event.decode_seconds, *(chunk.seconds for chunk in event.chunks)]
            assert sum(parts) == pytest.approx(event.seconds)
            assert min(parts) >= 0
            mixed = event if event.chunks and event.num_decodes else mixed
    assert mixed is not None
    assert mixed.chunks[0].seconds == pytest.approx(0.001 * mixed.chunks[0].length, rel=0.1)
    assert mixed.predicted_seconds == pytest.approx(mixed.seconds, rel=0.1)


def test_a_step_without_decodes_is_all_prefill() -> None:
    told = ToldEngine()
    told.add("only", 30)
    assert told.step().decode_seconds == 0


def test_a_prefix_hit_and_a_preemption_are_told_with_the_admission() -> None:
    told = ToldEngine(num_blocks=9, max_num_seqs=2, max_model_len=140)
    told.add("a", 40, max_tokens=60)
    told.add("b", 40, max_tokens=60)
    admissions = [admission for event in told.steps() for admission in event.admissions]
    assert [(a.request_id, a.was_preempted) for a in admissions] == [("a", False), ("b", False), ("b", True)]
    assert admissions[1].num_cached_tokens == 32
    assert admissions[2].num_tokens > 40


def test_a_late_token_comes_with_its_stall() -> None:
    slow_steps: list[int] = []

    told = ToldEngine("target:40", cost=lambda shape: 0.9 if slow_steps else step_seconds(shape))
    told.add("chat", 10, max_tokens=20)
    told.step()
    in_time = told.step()
    assert (in_time.stall, in_time.num_late_tokens, in_time.target_s) == (None, 0, 0.04)
    slow_steps.append(1)
    late = told.step()
    assert late.num_late_tokens == 1
    assert late.stall is not None
    assert (late.stall.request_id, late.stall.gap_s) == ("chat", pytest.approx(0.9))
    assert sum(cause.seconds for cause in late.stall.causes) == pytest.approx(0.9)
    assert late.stall.causes[0].kind == "unexplained"
    slow_steps.clear()
    assert told.step().stall is None


def test_requests_that_were_aborted_meanwhile_gave_nothing() -> None:
    told = ToldEngine(depth=2)
    told.add("stays", 10)
    told.add("goes", 10, token=2)
    told.step()
    told.engine.abort("goes")
    event = told.step()
    assert event.num_decodes == 2
    assert (event.decoded, event.num_output_tokens) == (["stays"], 1)


def test_a_policy_without_target_says_so() -> None:
    told = ToldEngine("fixed:64")
    told.add("chat", 10)
    event = told.step()
    assert (event.policy, event.target_s, event.feasible_target_s) == ("fixed:64", None, None)


def test_events_cross_a_process_border_unchanged() -> None:
    told = ToldEngine("target:11")
    told.add("chat", 10)
    told.add("long", 300, token=2)
    for event in told.steps():
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=StepEvent) == event
