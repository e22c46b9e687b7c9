"""Deadlines of requests: what has passed its own is never computed, and what will is refused at once."""

from __future__ import annotations

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.request import FinishReason, SamplingParams
from evenflow.errors import InvalidRequest, LateRequest
from tests.core.driving import Driver


def make_driver(depth: int = 1, max_num_seqs: int = 1) -> Driver:
    """Each row takes 1 ms, and the scheduler knows it."""
    driver = Driver(
        "fixed:100",
        cost=lambda shape: 0.001 * shape.total_rows,
        max_num_seqs=max_num_seqs,
        caps=ExecutorCaps(max_steps_in_flight=depth),
    )
    for length in (40, 700, 90, 1300, 260):
        driver.add(length, max_tokens=5)
        driver.run()
    return driver


def computed(driver: Driver) -> set[str]:
    return {name for plan in driver.plans for name in (*plan.decodes.request_ids, *(c.request_id for c in plan.chunks))}


def test_a_request_that_expires_in_the_queue_is_never_computed() -> None:
    driver = make_driver()
    driver.add(100, max_tokens=500, name="first")
    driver.step()
    waiting = driver.add(100, max_tokens=5, name="waiting", deadline=0.2)
    later = driver.add(100, max_tokens=5, name="later", deadline=5.0)
    while not driver.expire():
        assert not waiting.is_finished
        driver.step()
    assert driver.executor.clock.now >= waiting.expires_at
    assert (waiting.finish_reason, waiting.error) == (
        FinishReason.ERROR,
        "The request's deadline of 0.2 s passed before the first token.",
    )
    driver.run()
    assert "waiting" not in computed(driver)
    assert (later.finish_reason, later.num_output_tokens) == (FinishReason.LENGTH, 5)
    assert not driver.scheduler.expire(1e9), "ended ones do not expire"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_running_request_ends_at_its_deadline_and_frees_what_it_holds(depth: int) -> None:
    driver = make_driver(depth, max_num_seqs=2)
    running = driver.add(50, max_tokens=800, deadline=0.3)
    other = driver.add(50, max_tokens=400)
    while not driver.expire():
        driver.step()
    num_tokens = running.num_output_tokens
    assert 0 < num_tokens < 800
    assert running.error == f"The request's deadline of 0.3 s passed after {num_tokens} tokens of the answer."
    driver.run()
    assert running.num_output_tokens == num_tokens, "tokens of steps in flight are dropped"
    driver.check_output(running)
    driver.check_output(other)
    assert other.finish_reason is FinishReason.LENGTH
    assert driver.scheduler.pool.num_held == 0


def test_what_cannot_meet_its_deadline_is_refused_with_the_estimate() -> None:
    driver = make_driver()
    driver.add(600, max_tokens=2)
    with pytest.raises(LateRequest, match=r"the deadline is 0\.4 s: retry later") as refusal:
        driver.add(100, max_tokens=2, deadline=0.4)
    assert refusal.value.expected_s == pytest.approx(0.7, rel=0.1)
    assert refusal.value.is_deadline
    assert len(driver.scheduler.requests) == 1
    accepted = driver.add(100, max_tokens=2, deadline=1.0)
    driver.run()
    assert accepted.finish_reason is FinishReason.LENGTH


def test_deadlines_hold_without_a_target_and_must_make_sense() -> None:
    assert SamplingParams(deadline=2).deadline_seconds == SamplingParams(deadline="2s").deadline_seconds == 2
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match=r"Got deadline=.* but expected 0.0001 to 3600 seconds"):
            SamplingParams(deadline=wrong)
