"""Streams that end early, engines that die, servers that are full or shut down: everybody is told, nothing is left."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from evenflow.core.report import StepReport
from evenflow.core.request import Request, RequestRecord
from evenflow.server.metrics.observer import Listener
from tests.models import tiny_llama
from tests.server.serving import MODEL, RunningServer, model_server, scripted_server

LONG = {"prompt": [5, 6, 7], "max_tokens": 900, "stream": True}


@contextmanager
def open_stream(server: RunningServer, key: str = "none", **fields: object) -> Iterator[Iterator[str]]:
    """A stream that has given its first event."""
    body = {**LONG, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body, headers=headers, timeout=30, verify=False
    ) as response:
        lines = (line for line in response.iter_lines() if line)
        assert next(lines).startswith("data: ")
        yield lines


class LastStep(Listener):
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)


def test_a_request_is_encoded_once_and_not_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt takes milliseconds, for which other streams would wait."""
    loops: list[asyncio.AbstractEventLoop | None] = []
    record = Request.record

    def recorded(request: Request) -> RequestRecord:
        loops.append(asyncio._get_running_loop())
        return record(request)

    monkeypatch.setattr(Request, "record", recorded)
    with scripted_server() as server:
        assert server.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2}).status_code == 200
    assert loops == [None]


def test_a_client_that_goes_away_ends_its_request() -> None:
    with scripted_server(step_s=0.01) as server:
        steps = LastStep()
        server.client._observer.listen(steps)
        with open_stream(server) as staying:
            with open_stream(server, prompt=[1, 2]):
                server.until(lambda: steps.reports[-1].num_running == 2)
            server.until(lambda: steps.reports[-1].num_running == 1)
            assert server.client.num_open == 1
            assert next(staying)
        server.until(lambda: server.client.num_open == 0)
        whole = threading.Thread(target=lambda: _give_up_after(server, 0.1))
        whole.start()
        whole.join()
        server.until(lambda: server.client.num_open == 0 and server.server.service.gate.num_inside == 0)


def _give_up_after(server: RunningServer, seconds: float) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={**LONG, "stream": False}, timeout=seconds, verify=False)


@pytest.mark.slow
def test_when_the_engine_is_killed_streams_end_with_an_error_and_it_comes_back() -> None:
    with scripted_server(step_s=0.01, policy="target:50ms") as server:
        assert (
            httpx.put(server.url + "/v1/target", json={"tbt_target": "80ms", "paced": True}, verify=False).status_code
            == 200
        )
        with open_stream(server) as lines:
            [process] = [child for child in multiprocessing.active_children() if child.name == "evenflow-engine"]
            process.kill()
            *_, error, done = lines
        assert "died" in json.loads(error.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"
        refused = server.post("/v1/completions", {"prompt": [1]})
        if refused.status_code != 200:  # it may be back already
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert server.get("/health").status_code in (200, 503)
        server.until(lambda: server.get("/health").status_code == 200)
        assert server.get("/ready").status_code == 200
        answer = server.openai().completions.create(model=MODEL, prompt=[5, 6], max_tokens=3)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 3
        kept = {"policy": "target:80ms,paced", "tbt_target": 0.08, "paced": True, "feasible_target": None}
        assert server.get("/v1/target").json() == kept
        assert "evenflow:engine_restarts" in server.get("/metrics").text
        assert server.client.num_open == 0


def test_health_is_red_while_the_engine_is_down() -> None:
    with scripted_server(step_s=0.01) as server:
        client = server.client
        client.is_up = False
        for path in ("/health", "/ready"):
            assert server.get(path).status_code == 503
        assert server.post("/v1/completions", {"prompt": [1]}).status_code == 503
        assert server.get("/version").status_code == 200
        client.is_up = True
        assert server.get("/health").status_code == 200


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    limits = {"max_waiting": 2}
    with scripted_server(step_s=0.01, max_num_seqs=1, settings={"limits": limits}) as server:
        with open_stream(server):
            body = {"prompt": [1], "max_tokens": 2}
            waiting = [threading.Thread(target=server.post, args=("/v1/completions", body)) for _ in range(2)]
            for thread in waiting:
                thread.start()
            server.until(lambda: server.server.service.gate.num_inside == 3)
            refused = server.post("/v1/completions", {"prompt": [1]})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "overloaded"
            with pytest.raises(openai.InternalServerError):
                server.openai().completions.create(model=MODEL, prompt="a")
        for thread in waiting:
            thread.join()
        assert server.server.service.gate.num_inside == 0


def test_one_tenant_cannot_take_all_places() -> None:
    """Only an admin's key names tenants that are limited apart: before, any made-up name had a limit of its own."""

    def status(server: RunningServer, key: str, tenant: str) -> int:
        body = {"prompt": [1], "n": 2, "tenant": tenant}
        return server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).status_code

    limits = {"limits": {"max_tenant_requests": 2}}
    keys = {"api_keys": ["a", "b"], "admin_api_keys": ["admin"]}
    with scripted_server(step_s=0.01, settings={**limits, **keys}) as server:
        with open_stream(server, key="admin", tenant="one"):
            assert status(server, "admin", "one") == 429
            assert status(server, "admin", "two") == 200
        server.until(lambda: server.server.service.gate.num_inside == 0)
        assert status(server, "admin", "one") == 200
        with open_stream(server, key="a", tenant="one"):
            assert [status(server, "a", name) for name in ("one", "two", "invented")] == [429] * 3
            assert status(server, "b", "one") == 200
    with scripted_server(step_s=0.01, settings=limits) as server, open_stream(server, tenant="one"):
        assert status(server, "none", "invented") == 429, "without keys the address counts"


def test_a_shutdown_lets_open_streams_end() -> None:
    with (
        scripted_server(step_s=0.005, settings={"drain_s": 30.0}) as server,
        open_stream(server, max_tokens=100) as lines,
    ):
        server.server.should_exit = True
        received = list(lines)
    assert received[-1] == "data: [DONE]"
    assert json.loads(received[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_a_shutdown_tells_streams_that_do_not_end_in_time() -> None:
    with scripted_server(step_s=0.01, settings={"drain_s": 0.1}) as server, open_stream(server) as lines:
        server.server.should_exit = True
        received = list(lines)
    assert received[-1] == "data: [DONE]"
    assert "shutting down" in json.loads(received[-2].removeprefix("data: "))["error"]["message"]


@pytest.mark.slow
def test_hundreds_of_streams_at_once_are_all_answered() -> None:
    async def count_events(client: httpx.AsyncClient, number: int) -> int:
        body = {"prompt": [number, 3, 4], "max_tokens": 20, "stream": True, "logprobs": 0}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            return sum([line.count('"tokens"') async for line in response.aiter_lines()])

    async def main(url: str) -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(count_events(client, number) for number in range(200)))

    with scripted_server(step_s=0.001, max_num_seqs=300) as server:
        counts = asyncio.run(main(server.url))
        assert len(counts) == 200
        assert all(0 < count <= 20 for count in counts)
        assert server.client.num_open == 0


@pytest.mark.slow
def test_after_many_that_left_early_nothing_is_left_behind() -> None:
    """Requests that end, are aborted at any moment, or are stopped by text: all places and blocks are free again."""
    source = random.Random(3)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        body = {
            "prompt": [number % 400, *range(source.randint(1, 60))],
            "max_tokens": source.randint(1, 60),
            "stream": number % 3 > 0,
            "n": source.randint(1, 3),
            "stop": ["a", "."] if number % 5 == 0 else [],
        }
        patience = source.choice([None, 0.001, 0.02, 0.1])
        try:
            async with asyncio.timeout(patience), client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200
                async for _ in response.aiter_lines():
                    pass
        except (TimeoutError, httpx.HTTPError):
            assert patience is not None

    async def main(url: str) -> None:
        limits = httpx.Limits(max_connections=50)
        async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
            await asyncio.gather(*(one(client, number) for number in range(300)))

    with scripted_server(step_s=0.0005, max_num_seqs=16, num_blocks=100) as server:
        steps = LastStep()
        server.client._observer.listen(steps)
        asyncio.run(main(server.url))
        server.until(lambda: server.server.service.gate.num_inside == 0)
        assert server.client.num_open == 0
        assert not server.client._observer.requests
        assert server.post("/v1/completions", {"prompt": [1] * 20, "max_tokens": 1}).status_code == 200
        last = steps.reports[-1]
        assert (last.num_running, last.num_waiting) == (0, 0)
        assert last.kv_cache_usage == 0


@pytest.mark.slow
def test_a_restarted_engine_keeps_what_was_recorded(tmp_path: Path) -> None:
    """Before, each restart emptied the recording."""
    record = tmp_path / "steps.jsonl"
    body = {"prompt": [5, 6], "max_tokens": 5, "ignore_eos": True}
    with model_server(tiny_llama(), record=record, policy="fixed:64") as server:
        assert server.post("/v1/completions", body).status_code == 200
        (engine,) = [one for one in multiprocessing.active_children() if one.name == "evenflow-engine"]
        engine.kill()
        server.until(lambda: server.get("/health").status_code == 503)
        server.until(lambda: server.get("/health").status_code == 200, seconds=60)
        assert server.post("/v1/completions", body).status_code == 200
    for path in (record, tmp_path / "steps-2.jsonl"):
        assert path.read_text().startswith('{"version":')
        assert path.read_text().count('"event":"step"') == 5


def test_a_server_that_drains_says_so_to_new_clients() -> None:
    """Before, their connections were refused."""
    with (
        scripted_server(step_s=0.01, settings={"drain_s": 30.0}) as server,
        open_stream(server, max_tokens=900) as lines,
    ):
        server.server.should_exit = True
        server.until(lambda: server.server.service.gate.is_draining)
        refused = server.post("/v1/completions", {"prompt": [5], "max_tokens": 1})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert "shutting down" in refused.json()["error"]["message"]
        assert server.get("/ready").status_code == 503
        assert server.get("/health").status_code == 200
        assert next(lines).startswith("data: ")
