"""Settings that differ between vLLM's releases, on the installed one's scheduler and on others' attributes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.driving import Driver, make_request, make_scheduler

from evenflow.vllm import versions  # isort: skip

TARGET = 0.05


def chats_beside_a_prompt(change: Any) -> tuple[Driver, Any, list[str]]:
    """Chats that decode, then a long prompt; `change` alters vLLM's scheduler before."""
    driver = Driver(make_scheduler("50ms"))
    change(driver.scheduler)
    chats = [make_request(64, 3_000) for _ in range(8)]
    driver.add(*chats)
    driver.run(num_steps=20)
    driver.times.clear()
    driver.add(long := make_request(20_000, 1))
    while long.request_id not in driver.times:
        driver.step()
    return driver, long, [chat.request_id for chat in chats]


@pytest.mark.parametrize("name", ["local_prefill_interval", "prefill_schedule_interval"])
def test_an_interval_of_steps_holds_nothing_back(name: str) -> None:
    def hold_back(scheduler: Any) -> None:
        if name == "prefill_schedule_interval":  # as the ranks of a mixture of experts are throttled together
            schedule = scheduler.schedule
            scheduler.schedule = lambda: schedule(throttle_prefills=len(scheduler.requests) > 8)
        elif not hasattr(scheduler, name):
            pytest.skip("this vLLM has it not")
        else:
            scheduler.local_prefill_interval = 8

    driver, long, chats = chats_beside_a_prompt(hold_back)
    of_prompt = [number for number, ran in enumerate(driver.ran) if long.request_id in ran.chunks]
    assert of_prompt == list(range(of_prompt[0], of_prompt[-1] + 1))  # in every step
    assert max(driver.gaps(*chats)) <= 1.1 * TARGET
    if name == "local_prefill_interval":  # vLLM's again, as soon as the target is gone
        assert driver.scheduler.local_prefill_interval == 8


def test_places_beyond_the_active_ones_are_not_planned_for() -> None:
    scheduler = make_scheduler("50ms", max_num_seqs=16)
    if not hasattr(scheduler, "max_num_active_reqs"):
        pytest.skip("this vLLM has no such limit")
    scheduler.max_num_active_reqs = 4
    driver = Driver(scheduler)
    driver.add(*[make_request(64, 3_000) for _ in range(4)])
    driver.run(num_steps=20)
    driver.add(*[make_request(2_000, 4) for _ in range(8)])
    planned = []
    plan = scheduler.steering.core.plan
    scheduler.steering.core.plan = lambda *args, **settings: planned.append(args[2]) or plan(*args, **settings)
    driver.run(num_steps=20)
    assert len(planned) == 20
    assert not any(planned)


@pytest.mark.parametrize(
    ("adaptive", "num_requests", "expected"),
    [(None, 1, 64), (None, 4, 64), (False, 1, 0), (False, 4, 64), (True, 4, 2048)],
)
def test_the_users_limit_on_chunks(adaptive: bool | None, num_requests: int, expected: int) -> None:
    config = SimpleNamespace(long_prefill_token_threshold=64, max_num_batched_tokens=8192)
    scheduler = SimpleNamespace(scheduler_config=config)
    if adaptive is not None:  # since 0.31
        scheduler.adaptive_long_prefill_threshold = adaptive
    assert versions.long_prefill_threshold(scheduler, num_requests) == expected
    config.long_prefill_token_threshold = 0
    assert versions.long_prefill_threshold(scheduler, num_requests) == 0


@pytest.mark.parametrize(
    ("queues", "expected"),
    [({"skipped_waiting": "a", "waiting": "bc"}, "abc"), ({"kv_holding_waiting": "a", "waiting": "bc"}, "abc")],
)
def test_waiting_requests_of_every_queue(queues: dict[str, str], expected: str) -> None:
    assert "".join(versions.waiting_requests(SimpleNamespace(**queues))) == expected


def test_settings_that_do_not_go_with_a_target_are_named(caplog_vllm: list[str]) -> None:
    config = make_scheduler(None).scheduler_config
    assert list(versions.settings_against_a_target(config)) == []
    config.prefill_schedule_interval, config.stream_interval = 4, 8
    first, second = versions.settings_against_a_target(config)
    assert first.startswith("evenflow: prefill_schedule_interval=4 has no effect")
    assert second.startswith("evenflow: stream_interval=8 delivers")


@pytest.mark.parametrize(("version", "expected"), [("0.26.0", False), ("0.27.1", True), ("0.33.0+cpu", True)])
def test_blocks_of_states_are_split_since_0_27(version: str, expected: bool) -> None:
    assert versions.splits_blocks(version) is expected
