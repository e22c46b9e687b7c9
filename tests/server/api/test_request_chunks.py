"""How a request's prompt was prefilled, asked for with OpenAI's package over evenflow's own engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from evenflow.core.plan import ChunkReason
from evenflow.core.report import ChunkReport
from evenflow.server.api import request_chunks
from evenflow.server.api.request_chunks import RecentRequests
from evenflow.server.metrics.observer import Observer, ServedRequest
from tests.server.serving import ANYONE, MODEL, RunningServer, scripted_server

BUDGET = 64


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(policy=f"fixed:{BUDGET}", step_s=0.001) as running:
        yield running


def ask(server: RunningServer, response_id: str) -> list[dict[str, Any]]:
    found: Any = server.openai().get(f"/requests/{response_id}/chunks", cast_to=object)
    assert found["id"] == response_id
    requests: list[dict[str, Any]] = found["requests"]
    return requests


def lengths(request: dict[str, Any]) -> list[int]:
    return [chunk["length"] for chunk in request["chunks"]]


def test_a_prompt_is_all_in_its_chunks(server: RunningServer) -> None:
    answer = server.openai().completions.create(model=MODEL, prompt=[7] * 150, max_tokens=3)
    (request,) = ask(server, answer.id)
    chunks = request["chunks"]
    assert [(chunk["start"], chunk["length"]) for chunk in chunks] == [(0, 64), (64, 64), (128, 22)]
    assert [chunk["reason"] for chunk in chunks] == ["budget", "budget", "end_of_prompt"]
    assert (request["id"], request["prompt_tokens"], request["cached_tokens"]) == (answer.id, 150, 0)
    ends = [chunk["end_s"] for chunk in chunks]
    assert 0 <= request["queue_s"] <= ends[0] < ends[1] < ends[2] == request["ttft_s"]
    assert all(0 <= chunk["seconds"] <= chunk["end_s"] for chunk in chunks)


def test_late_tokens_have_their_gaps_and_causes() -> None:
    with scripted_server(policy="target:1ms", step_s=0.02) as server:
        answer = server.openai().completions.create(model=MODEL, prompt=[7] * 40, max_tokens=12)
        (request,) = ask(server, answer.id)
    assert (request["output_tokens"], request["finish_reason"]) == (12, "length")
    late = request["late"]
    assert len(late) == 8  # the longest of eleven
    for gap in late:
        assert 0.02 <= gap["gap_s"] == pytest.approx(sum(cause["seconds"] for cause in gap["causes"]), abs=1e-4)
        assert 0 < gap["late_s"] < gap["gap_s"]
    times = [request["ttft_s"], *(gap["at_s"] for gap in late)]
    assert times == sorted(times)
    assert times[-1] <= request["end_s"]


def test_a_request_that_runs_has_not_ended(server: RunningServer) -> None:
    with server.openai().completions.create(model=MODEL, prompt="a", max_tokens=900, stream=True) as stream:
        (request,) = ask(server, next(iter(stream)).id)
    assert request["late"] == []
    assert {request[name] for name in ("output_tokens", "finish_reason", "end_s")} == {None}


def test_a_cached_prefix_has_no_chunk(server: RunningServer) -> None:
    prompt = [9] * 100
    server.openai().completions.create(model=MODEL, prompt=prompt, max_tokens=1)
    answer = server.openai().completions.create(model=MODEL, prompt=[*prompt, 8, 8], max_tokens=1)
    (request,) = ask(server, answer.id)
    assert request["cached_tokens"] == request["chunks"][0]["start"] == 96
    assert lengths(request) == [6]


def test_every_choice_of_every_prompt_is_listed(server: RunningServer) -> None:
    prompts = [[number] * size for number, size in ((11, 70), (12, 10))]
    answer = server.openai().completions.create(model=MODEL, prompt=prompts, n=2, max_tokens=1)
    assert [request["prompt_tokens"] for request in ask(server, answer.id)] == [70, 70, 10, 10]


def test_a_stream_may_ask_while_it_runs(server: RunningServer) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with server.openai().chat.completions.create(model=MODEL, messages=messages, max_tokens=900, stream=True) as stream:
        first = next(iter(stream))
        (request,) = ask(server, first.id)
    assert sum(lengths(request)) == request["prompt_tokens"]
    assert request["ttft_s"] > 0


def test_an_unknown_id_is_not_found(server: RunningServer) -> None:
    refused = server.get("/v1/requests/cmpl-no-such/chunks")
    assert refused.status_code == 404
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("request_not_found", "request_id")
    assert "'cmpl-no-such'" in error["message"]


def test_it_needs_a_key_where_keys_are_set() -> None:
    with scripted_server(settings={"api_keys": ["secret"]}) as server:
        assert server.get("/v1/requests/x/chunks").status_code == 401


def recent(*requests: tuple[str, int]) -> RecentRequests:
    """After these have ended, each with a number of chunks."""
    observer = Observer("m")
    found = RecentRequests(observer)
    for request_id, num_chunks in requests:
        record = ServedRequest(request_id, "", 1, 1, started_at=0.0)
        record.chunks += [(1.0, ChunkReport(request_id, 0, 1, ChunkReason.BUDGET, 0.1, False))] * num_chunks
        observer.on_request_started(record)
        observer.on_request_finished(request_id, "stop", 1)
    return found


@pytest.mark.parametrize(
    ("response_id", "request_ids"),
    [
        ("cmpl-a", ["cmpl-a-0-01234567", "cmpl-a-1-89abcdef", "cmpl-a-10-89abcdef"]),  # vLLM, a batch
        ("chatcmpl-a", ["0_chatcmpl-a-01234567", "1_chatcmpl-a-01234567"]),  # vLLM, choices
        ("3f2a", ["3f2a"]),  # SGLang
        ("mine", ["mine_0", "mine_1"]),  # SGLang, a batch with an id of its own
        ("cmpl-a.b", ["cmpl-a.b"]),
    ],
)
def test_engines_names_for_a_responses_requests(response_id: str, request_ids: list[str]) -> None:
    others = ["cmpl-b-0-01234567", "cmpl-aa-0-01234567", "cmpl-axb", "x3f2a", "3f2a-later"]
    found = recent(*((request_id, 1) for request_id in [*others, *reversed(request_ids)]))
    assert [record.request_id for record in found.find(response_id, ANYONE)] == request_ids


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_chunks, "MAX_FINISHED", 3)
    found = recent(*((str(number), 1) for number in range(5)))
    assert [bool(found.find(str(number), ANYONE)) for number in range(5)] == [False, False, True, True, True]
    monkeypatch.setattr(request_chunks, "_MAX_CHUNKS", 10)
    found = recent(("first", 6), ("second", 4), ("third", 1))
    assert [bool(found.find(name, ANYONE)) for name in ("first", "second", "third")] == [False, True, True]


def test_only_the_key_that_sent_a_request_and_admins_see_its_chunks() -> None:
    """Before, every key did."""
    with scripted_server(settings={"api_keys": ["a", "b"], "admin_api_keys": ["admin"]}) as server:

        def header(key: str) -> dict[str, str]:
            return {"Authorization": f"Bearer {key}"}

        for body in ({"prompt": [5, 6]}, {"prompt": [5, 6], "n": 2}):
            response_id = server.post("/v1/completions", body, headers=header("a")).json()["id"]
            path = f"/v1/requests/{response_id}/chunks"
            statuses = {key: server.get(path, headers=header(key)).status_code for key in ("a", "b", "admin")}
            assert statuses == {"a": 200, "b": 404, "admin": 200}
