"""The steps before the first request, on SGLang's own scheduler and model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sglang.driving import Driver, request

pytestmark = pytest.mark.filterwarnings("ignore")


def script() -> list[list[Any]]:
    return [[request("stream", 20, 30)], [], [], [request("long", 900, 3, first_token=1)]]


def run_steered(driver: Driver) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and the free memory afterwards."""
    driver.steer("20ms")
    driver.run(script())
    outputs = {name: list(tokens) for name, tokens in driver.outputs.items()}
    driver.scheduler.flush_cache()
    return outputs, driver.scheduler.pool_stats_observer.get_pool_stats().full_available_size


def test_every_kind_of_step_runs_and_nothing_remains(
    driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from evenflow.sglang.rehearsal import rehearse

    sent: list[Any] = []
    streamer = type(driver.scheduler.output_streamer)
    expected = run_steered(driver)
    steering = driver.scheduler.evenflow
    receive = type(driver.scheduler.request_receiver).recv_requests
    driver.steps = []
    with monkeypatch.context() as patch:
        patch.setattr(streamer, "stream_output", lambda _, reqs, *args, **kwargs: sent.extend(reqs))
        rehearse(driver.scheduler)
    kinds = {(bool(step.decodes), bool(step.chunks)) for step in driver.steps}
    assert kinds == {(True, False), (False, True), (True, True)}
    assert max(start for step in driver.steps if step.decodes for start, _ in step.chunks.values()) > 4000
    long = next(name for step in driver.steps for name, (start, _) in step.chunks.items() if start > 4000)
    assert any(long in step.decodes and step.chunks for step in driver.steps)
    assert sent == []
    assert any("steps before the first request" in line for line in logged)
    assert driver.scheduler.evenflow is steering
    assert type(driver.scheduler.request_receiver).recv_requests is receive
    assert not driver.scheduler.gracefully_exit
    assert run_steered(driver) == expected


@pytest.mark.parametrize("fails_at", [1, 4, 9])
def test_after_a_step_that_fails_sglang_serves_as_before(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    from evenflow.sglang.rehearsal import rehearse

    expected = run_steered(driver)
    by_driver, num_steps = driver.scheduler.run_batch, 0

    def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == fails_at:
            raise RuntimeError("no such kernel")
        return by_driver(batch, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(driver.scheduler, "run_batch", run)
        with pytest.raises(RuntimeError, match="no such kernel"):
            rehearse(driver.scheduler)
    assert run_steered(driver) == expected


def test_a_loop_that_does_not_end_is_left(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.sglang import rehearsal

    expected = run_steered(driver)
    monkeypatch.setattr(rehearsal, "_MOST_TURNS", 5)
    with pytest.raises(TimeoutError, match="within 5 turns"):
        rehearsal.rehearse(driver.scheduler)
    assert run_steered(driver) == expected
