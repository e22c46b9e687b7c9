"""The feed tells what ran, in columns that fit together, and keeps nothing for readers that are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.testclient import TestClient

from evenflow.server.access import Caller
from evenflow.server.live import feed as live
from evenflow.server.live.feed import LiveFeed, StepRow, router
from evenflow.server.metrics.observer import EngineState
from tests.server.stepping import ObservedEngine, step_seconds


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BATCH_S", 0)


async def read(stream: AsyncIterator[bytes]) -> tuple[str, Any]:
    event, data = (await anext(stream)).decode().strip().split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def read_until(stream: AsyncIterator[bytes], wanted: str) -> Any:
    while True:
        event, data = await read(stream)
        if event == wanted:
            return data


def read_one(feed: LiveFeed, wanted: str, caller: Caller | None = None) -> Any:
    async def reading() -> Any:
        stream = feed.stream(caller)
        data = await read_until(stream, wanted)
        await stream.aclose()
        return data

    return asyncio.run(reading())


def test_steps_are_told_as_columns() -> None:
    observed = ObservedEngine("fixed:32")
    feed = LiveFeed(observed.observer)
    observed.add("chat", 10)
    observed.add("long", 50, max_tokens=1, token=2)
    events = observed.run()
    columns = read_one(feed, "steps")
    assert set(columns) == {*StepRow._fields, "now"}
    assert columns["step"] == [event.step_id for event in events]
    assert columns["seconds"] == pytest.approx([event.seconds for event in events])
    assert columns["tokens"] == [event.num_output_tokens for event in events]
    first, second = events[0].chunks
    assert columns["chunks"][0] == [
        [1, 0, 10, "end_of_prompt", pytest.approx(first.seconds)],
        [2, 0, 22, "budget", pytest.approx(second.seconds)],
    ]
    assert columns["now"] == observed.clock()


def test_each_reader_hears_of_each_step_once() -> None:
    observed = ObservedEngine()
    feed = LiveFeed(observed.observer)
    observed.add("chat", 10, max_tokens=30)

    async def reading() -> list[list[int]]:
        streams = [feed.stream(), feed.stream()]
        told: list[list[int]] = [[], []]
        for _ in range(3):
            for _ in range(4):
                observed.step()
            for reader, stream in enumerate(streams):
                told[reader] += (await read_until(stream, "steps"))["step"]
        for stream in streams:
            await stream.aclose()
        return told

    assert asyncio.run(reading()) == [list(range(12)), list(range(12))]


def test_a_slow_reader_misses_steps_but_none_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_STEPS_AT_ONCE", 5)
    observed = ObservedEngine()
    feed = LiveFeed(observed.observer)
    observed.add("chat", 10, max_tokens=30)
    observed.run()
    assert read_one(feed, "steps")["step"] == [25, 26, 27, 28, 29]


def test_figures_are_those_of_the_last_seconds() -> None:
    observed = ObservedEngine("target:40ms", max_num_seqs=2)
    feed = LiveFeed(observed.observer)
    for number in range(3):
        observed.add(f"chat-{number}", 40, max_tokens=100)
    for _ in range(30):
        event = observed.step()
    figures = read_one(feed, "figures")
    assert (figures["running"], figures["waiting"], figures["up"]) == (2, 1, True)
    assert (figures["target"], figures["policy"]) == (0.04, "target:40ms")
    assert figures["kv"] == event.kv_cache_usage
    assert figures["tbt"][0] == pytest.approx(0.011, rel=0.02)
    assert figures["hits"] == pytest.approx(32 / 80)
    for number in range(3):
        observed.abort(f"chat-{number}")
    figures = read_one(feed, "figures")
    assert (figures["running"], figures["waiting"], figures["kv"]) == (0, 0, 0)


def test_classes_have_their_own_queues_and_latencies() -> None:
    observed = ObservedEngine(max_num_seqs=2)
    feed = LiveFeed(observed.observer)
    assert read_one(feed, "figures")["classes"] == []
    observed.add("chat", 40, max_tokens=100, service_class="interactive")
    for _ in range(20):
        observed.step()
    observed.add("job-1", 60, max_tokens=100, service_class="batch", token=2)
    observed.add("job-2", 60, max_tokens=100, service_class="batch", token=3)
    for _ in range(10):
        observed.step()
    urgent, patient = read_one(feed, "figures")["classes"]
    assert (urgent["name"], urgent["running"], urgent["waiting"]) == ("interactive", 1, 0)
    assert (patient["name"], patient["running"], patient["waiting"]) == ("batch", 1, 1)
    assert urgent["ttft"][0] == pytest.approx(0.050, rel=0.03)
    assert patient["ttft"][0] > urgent["ttft"][0]
    assert urgent["tbt"][1] > patient["tbt"][1], "the chat waited while the first job's prompt ran"
    assert observed.figure("evenflow:class_waiting_requests", service_class="batch") == 1
    assert observed.figure("evenflow:class_tbt_seconds_count", service_class="interactive") == 29
    assert observed.figure("evenflow:class_tbt_seconds_count", service_class="batch") == 9
    observed.abort("job-2")
    observed.run()
    assert [(one["running"], one["waiting"]) for one in read_one(feed, "figures")["classes"]] == [(0, 0), (0, 0)]


def test_tenants_are_shown_to_those_who_may_see_them() -> None:
    observed = ObservedEngine(max_num_seqs=1)
    feed = LiveFeed(observed.observer)
    observed.add("a", 40, max_tokens=50, key="acme")
    observed.add("b", 40, max_tokens=50, key="acme")
    observed.add("c", 40, max_tokens=50, key="other", tenant="team")
    observed.add("d", 40, max_tokens=50)
    observed.step()
    seen = {
        name: read_one(feed, "figures", Caller("digest", name, "", is_admin=name == "admin"))["tenants"]
        for name in ("acme", "other", "admin")
    }
    acme = {"name": "acme", "running": 1, "waiting": 1}
    other = {"name": "other/team", "running": 0, "waiting": 1}
    assert seen == {"acme": [acme], "other": [other], "admin": [acme, other]}
    assert read_one(feed, "figures")["tenants"] == []


def test_a_target_that_was_changed_is_told_before_a_step_runs() -> None:
    observed = ObservedEngine()
    feed = LiveFeed(observed.observer)
    assert read_one(feed, "figures")["target"] is None
    observed.observer.on_engine_state(EngineState(is_up=True, policy="target:70ms", target_s=0.07))
    assert read_one(feed, "figures")["target"] == 0.07
    observed.observer.on_engine_state(EngineState(is_up=False, num_restarts=1, policy="target:70ms", target_s=0.07))
    figures = read_one(feed, "figures")
    assert (figures["up"], figures["restarts"]) == (False, 1)


def test_the_worst_stalls_come_first_and_the_old_are_forgotten() -> None:
    seconds = [0.0]
    observed = ObservedEngine("target:40ms", cost=lambda shape: seconds[0] or step_seconds(shape))
    feed = LiveFeed(observed.observer)
    observed.add("chat", 10, max_tokens=300)
    for slow in (0.0, 0.0, 0.5, 0.9, 0.0, 0.2, *[0.1] * 20):
        seconds[0] = slow
        observed.step()
    admin = Caller("", "", "", is_admin=True)
    stalls = read_one(feed, "figures", admin)["stalls"]
    assert [stall["gap"] for stall in stalls] == pytest.approx([0.9, 0.5, 0.2, 0.1, 0.1, 0.1])
    assert (stalls[0]["request"], stalls[0]["id"], stalls[0]["streams"]) == (1, "chat", 1)
    assert sum(cause[1] for cause in stalls[0]["causes"]) == pytest.approx(0.9)
    seconds[0] = 299.5
    observed.step()
    gaps = [stall["gap"] for stall in read_one(feed, "figures")["stalls"]]
    assert gaps[0] == pytest.approx(299.5)
    assert 0.9 not in gaps


def test_a_stall_names_a_request_to_its_own_key_alone() -> None:
    """Before, every key was told the id of every request that stalled."""
    seconds = [0.0]
    observed = ObservedEngine("target:40ms", cost=lambda shape: seconds[0] or step_seconds(shape))
    feed = LiveFeed(observed.observer)
    observed.add("chat", 10, max_tokens=300, key="acme")
    for slow in (0.0, 0.0, 0.5):
        seconds[0] = slow
        observed.step()
    callers = [None, *(Caller("digest", name, "", is_admin=name == "admin") for name in ("acme", "other", "admin"))]
    stalls = [read_one(feed, "figures", caller)["stalls"][0] for caller in callers]
    assert [stall.get("id") for stall in stalls] == [None, "chat", None, "chat"]
    assert not any("key" in stall for stall in stalls)


def test_one_client_leaves_feeds_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one key could hold all of them."""
    monkeypatch.setattr(live, "MAX_OWN_READERS", 2)
    feed = LiveFeed(ObservedEngine().observer)
    flood, other = (Caller(name, name, "", is_admin=False) for name in ("flood", "other"))

    async def reading() -> None:
        opened = [feed.stream(flood) for _ in range(3)]
        assert [(await read(one))[0] for one in opened] == ["hello", "hello", "full"]
        assert (await read(feed.stream(other)))[0] == "hello"
        await opened[0].aclose()
        assert (await read(feed.stream(flood)))[0] == "hello"

    asyncio.run(reading())


def test_readers_are_limited_and_can_be_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_READERS", 1)
    feed = LiveFeed(ObservedEngine().observer)

    async def reading() -> None:
        first = feed.stream()
        assert (await read(first))[0] == "hello"
        assert [(await read(one))[0] for one in [feed.stream()]] == ["full"]
        await first.aclose()
        third = feed.stream()
        assert (await read(third))[0] == "hello"
        feed.close()
        assert [event async for event in third] == []

    asyncio.run(reading())


def test_the_page_is_open_and_the_feed_is_not() -> None:
    def refuse() -> None:
        raise HTTPException(401)

    app = FastAPI()
    app.include_router(router(LiveFeed(ObservedEngine().observer), [Depends(refuse)]))
    with TestClient(app) as client:
        page = client.get("/")
        assert page.status_code == 200
        assert "script-src 'self'" in page.headers["content-security-policy"]
        for name in Path(live.__file__).with_name("dashboard").iterdir():
            assert client.get(f"/live/{name.name}").status_code == 200
        script = client.get("/live/main.js")
        assert script.headers["content-type"].startswith("text/javascript")
        for name in ("nothing.js", "..%2Flive.py", "%2e%2e/metrics.py"):
            assert client.get(f"/live/{name}").status_code == 404
        assert client.get("/live/feed").status_code == 401
