"""Engines that die or hang under open requests: who begins again, who is told, and whether the accounts add up."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from evenflow.core.request import SamplingParams
from evenflow.engine.client import Stream
from evenflow.executors.faulty import MOMENTS, Fault, Moment
from evenflow.server.metrics.request_accounts import Accounts, read_accounts
from tests.models import tiny_llama
from tests.server.serving import ANYONE, RunningServer, model_server, scripted_server

COMPLETION = "/v1/completions"
LONG = {"prompt": [5, 6, 7], "max_tokens": 60, "temperature": 0, "ignore_eos": True}


def engine_pid() -> int:
    [process] = [child for child in multiprocessing.active_children() if child.name == "evenflow-engine"]
    assert process.pid is not None
    return process.pid


@contextmanager
def answering(server: RunningServer, **fields: object) -> Iterator[list[httpx.Response]]:
    """A request that runs beside; its response is there after the context."""
    found: list[httpx.Response] = []
    body = {**LONG, **fields}
    thread = threading.Thread(target=lambda: found.append(server.post(COMPLETION, body)))
    thread.start()
    yield found
    thread.join()


def closed_accounts(path: Path) -> Accounts:
    accounts = read_accounts([path])
    assert accounts.adds_up, accounts.problems
    assert not accounts.still_open
    return accounts


@pytest.mark.slow
def test_after_a_kill_what_was_shown_is_told_and_the_rest_begins_again(tmp_path: Path) -> None:
    """A real engine with a real model dies by kill -9 under a stream, a whole answer, and requests that wait."""
    log = tmp_path / "log"
    settings = {"policy": "fixed:64", "max_num_seqs": 2, "served": {"request_log": log}}
    with model_server(tiny_llama(), **settings) as server:
        expected = server.post(COMPLETION, LONG).json()["choices"][0]["text"]
        body = {**LONG, "prompt": [9, 8], "max_tokens": 250, "stream": True}
        with (
            answering(server, max_tokens=60) as whole,
            httpx.stream("POST", server.url + COMPLETION, json=body, timeout=60, verify=False) as stream,
        ):
            lines = (line for line in stream.iter_lines() if line)
            assert next(lines).startswith("data: ")
            os.kill(engine_pid(), signal.SIGSTOP)
            with answering(server) as waiting, answering(server, stream=True) as waiting_stream:
                server.until(lambda: server.client.num_open + len(whole) == 4)
                os.kill(engine_pid(), signal.SIGKILL)
                *_, error, done = lines
            assert "died" in json.loads(error.removeprefix("data: "))["error"]["message"]
            assert done == "data: [DONE]"
        assert [one.status_code for one in (*whole, *waiting, *waiting_stream)] == [200] * 3
        assert [one.json()["choices"][0]["text"] for one in (*whole, *waiting)] == [expected] * 2
        assert waiting_stream[0].text.endswith("data: [DONE]\n\n")
        assert "error" not in waiting_stream[0].text
        metrics = server.get("/metrics").text
        assert 'evenflow:retries_total{engine="0",fault="engine"' in metrics
    accounts = closed_accounts(log)
    assert (accounts.num_accepted, accounts.ended["error"], accounts.ended["length"]) == (5, 1, 4)
    assert accounts.num_retries >= 2


@pytest.mark.slow
def test_a_second_death_ends_a_request_that_began_again(tmp_path: Path) -> None:
    """It may be what kills the engine: it must not do so for ever."""
    with (
        scripted_server(step_s=0.02, settings={"request_log": tmp_path / "log"}) as server,
        answering(server, max_tokens=900) as found,
    ):
        for _ in range(2):
            server.until(lambda: server.client.is_up and server.client.num_open == 1)
            pid = engine_pid()
            os.kill(pid, signal.SIGKILL)
            server.until(lambda: not server.client.is_up)
    assert found[0].status_code == 503
    assert "died" in found[0].json()["error"]["message"]
    assert closed_accounts(tmp_path / "log").num_retries == 1


def test_a_request_that_comes_as_the_engine_dies_begins_again(tmp_path: Path) -> None:
    """The connection is closed, and the server has not taken notice yet."""
    found: list[Stream] = []
    with scripted_server(settings={"request_log": tmp_path / "log"}) as server:
        client = server.client

        def come(lost: asyncio.Future[None]) -> None:
            assert client.is_up
            request = client.prepare([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True), request_id="late")
            found.append(client.submit(request, caller=ANYONE))

        assert client._link is not None
        lost = client._link.lost
        lost.get_loop().call_soon_threadsafe(lost.add_done_callback, come)
        os.kill(engine_pid(), signal.SIGKILL)
        server.until(lambda: bool(found) and found[0].output.finish_reason == "length")
    accounts = closed_accounts(tmp_path / "log")
    assert (accounts.num_accepted, accounts.num_retries, accounts.ended["length"]) == (1, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [one if one == "decode" else pytest.param(one, marks=pytest.mark.slow) for one in MOMENTS]
)
def test_a_hung_engine_is_replaced(moment: Moment, tmp_path: Path) -> None:
    """The last rows of the fault table; what had not been shown begins again."""
    after = {"admission": 1, "prefill": 1, "decode": 70, "restore": 0, "commit": 70}[moment]
    prompt = list(range(40))
    hang = Fault("hang", moment, after=after)
    # A busy machine's steps end within five seconds.
    engine: dict[str, Any] = {"faults": [hang], "marker": str(tmp_path / "marker"), "step_timeout_s": 5.0}
    with scripted_server(step_s=0.002, settings={"request_log": tmp_path / "log"}, **engine) as server:
        texts = []
        for _ in range(3):
            answer = server.post(COMPLETION, {**LONG, "prompt": prompt})
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
        assert len(set(texts)) == 1
        assert server.client._num_restarts == 1
        assert "hung in a step" in str(server.client.failure)
    assert closed_accounts(tmp_path / "log").num_retries == 1


def test_a_fault_in_a_step_is_not_seen_by_clients(tmp_path: Path) -> None:
    faults = [Fault("nan", "decode", after=5), Fault("out-of-memory", "prefill")]
    with scripted_server(faults=faults, settings={"request_log": tmp_path / "log"}) as server:
        lines = server.events(COMPLETION, LONG)
        assert lines[-1]["choices"][0]["finish_reason"] == "length"
        assert server.client._num_restarts == 0
        figure = [line for line in server.get("/metrics").text.splitlines() if 'fault="step"' in line]
        assert [line.rpartition(" ")[2] for line in figure if "_total" in line] == ["2.0"]
    assert closed_accounts(tmp_path / "log").num_retries == 2


def test_an_engine_that_admits_nothing_is_not_ready() -> None:
    with scripted_server() as server:
        server.client._observer.admission_failure = "no prompt was computed in 64 steps although the next one fits"
        answer = server.get("/ready")
        assert answer.status_code == 503
        assert "serves none: no prompt was computed in 64 steps" in answer.json()["error"]["message"]
        assert server.get("/health").status_code == 200
        server.client._observer.admission_failure = None
        assert server.get("/ready").status_code == 200


def test_requests_are_cancelled_wherever_they_are(tmp_path: Path) -> None:
    """While they wait for a slot, are prefilled, decode, or wait for the next engine."""
    log = tmp_path / "log"
    engine: dict[str, Any] = {"step_s": 0.02, "policy": "fixed:16", "max_num_seqs": 2}

    def leave(server: RunningServer, **fields: object) -> socket.socket:
        """A client that has sent a request, and leaves when it is closed."""
        body = json.dumps({**LONG, "max_tokens": 400, **fields}).encode()
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        client = socket.create_connection(("127.0.0.1", server.port))
        client.sendall(head.encode() + body)
        return client

    with scripted_server(settings={"request_log": log}, **engine) as server:
        decoding = leave(server, stream=True)
        prefilling = leave(server, prompt=list(range(500)))
        server.until(lambda: server.client.num_open == 2)
        waiting = leave(server)
        server.until(lambda: server.client.num_open == 3)
        for client in (waiting, prefilling, decoding):
            before = server.client.num_open
            client.close()
            server.until(lambda before=before: server.client.num_open == before - 1)
        whole = leave(server)
        server.until(lambda: server.client.num_open == 1)
        os.kill(engine_pid(), signal.SIGKILL)
        server.until(lambda: not server.client.is_up)
        assert server.client.num_open == 1
        whole.close()
        server.until(lambda: server.client.num_open == 0)
        server.until(lambda: server.server.service.gate.num_inside == 0)
    accounts = closed_accounts(log)
    assert (accounts.num_accepted, dict(accounts.ended)) == (4, {"abort": 4})
