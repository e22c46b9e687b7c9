"""The most that a response can take is known before anything is computed for it, and bounded."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from evenflow.server.api.job import ResponseSize
from evenflow.server.api.json_pieces import PIECE_BYTES, Rows, encode_json, json_pieces
from tests.server.api.worst_cases import PARTS, worst_cases
from tests.server.engines import scoring_engine
from tests.server.serving import RunningServer, running_server

LIMIT = 1 << 20
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(scoring_engine, limits={"max_response_size": LIMIT, "max_n": 30}) as running:
        yield running


Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [(path, body) for path, parts in PARTS.items() for body in worst_cases(parts)]


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was expected of the requests since it was cleared."""
    found: list[int] = []
    most_bytes = ResponseSize.most_bytes

    def recorded(self: ResponseSize, *args: Any) -> int:
        found.append(most_bytes(self, *args))
        return found[-1]

    monkeypatch.setattr(ResponseSize, "most_bytes", recorded)
    return found


def check_case(client: httpx.Client, case: Case, limit: int, predicted: list[int]) -> int:
    """The size of its response, 0 if that was refused. A stream keeps no event that it has sent: the largest counts."""
    path, body = case
    is_ollama = path.startswith("/api/")
    streams, between = body.get("stream", is_ollama), b"\n" if is_ollama else b"\n\n"
    predicted.clear()
    with client.stream("POST", path, json=body) as response:
        if response.status_code == 400:
            error = json.loads(response.read())["error"]
            message = error if is_ollama else error["message"]
            assert "expected" in message or "but this server allows" in message, (path, body, error)
            return 0
        assert response.status_code == 200, (path, body, response.read())
        if streams:
            size = max(len(part) for part in b"".join(response.iter_raw()).split(between))
        else:
            size = sum(map(len, response.iter_raw()))
    assert size <= limit, (path, body)
    merges = streams and path != "/v1/responses"  # tokens that the client has no time for
    # Ollama's answers get as many tokens as the bound allows: no size of theirs is asked for.
    if body.keys() & {"max_tokens", "max_output_tokens", "prompt"} and not merges and not is_ollama:
        assert size <= max(predicted), (path, body)
    return size


@pytest.mark.slow
def test_no_response_is_larger_than_predicted_or_allowed(server: RunningServer, predicted: list[int]) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        sizes = [check_case(client, case, LIMIT, predicted) for case in CASES[::2]]
    assert max(sizes) > LIMIT / 4, "some come near"
    assert 0 < sizes.count(0) < len(sizes) / 2


@pytest.mark.slow
def test_no_request_takes_more_memory_than_allowed(predicted: list[int]) -> None:
    limit = 8 << 20
    with (
        running_server(scoring_engine, limits={"max_response_size": limit}) as server,
        httpx.Client(base_url=server.url, timeout=600) as client,
    ):
        tracemalloc.start()
        try:
            for case in CASES:
                gc.collect()
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                check_case(client, case, limit, predicted)
                _, most = tracemalloc.get_traced_memory()
                assert most - before <= 2 * limit, case  # what the server holds, and what is being written
        finally:
            tracemalloc.stop()


def test_a_refusal_names_the_bound_and_what_to_lower(server: RunningServer) -> None:
    """Before, this was made: 703 MB, and the front took 5.8 GB for it."""
    body = {"prompt": [5] * 900, "n": 28, "max_tokens": 90, "prompt_logprobs": 20}
    error = server.post(COMPLETION, body).json()["error"]
    assert f"but this server allows {LIMIT}: lower n or max_tokens or prompt_logprobs." in error["message"]
    assert error["code"] == "response_too_large"
    assert server.server.service.gate.num_inside == 0


def test_an_answer_of_unstated_length_ends_where_its_response_is_full(server: RunningServer) -> None:
    body = {"messages": HELLO, "n": 20, "logprobs": True, "top_logprobs": 20}
    response = server.post(CHAT, body)
    assert response.status_code == 200
    assert LIMIT / 4 < len(response.content) <= LIMIT
    assert {choice["finish_reason"] for choice in response.json()["choices"]} == {"length"}


def test_each_choice_of_a_prompt_counts_what_is_held_for_it() -> None:
    """Before, a prompt of 200,000 tokens with 128 choices took half a gigabyte before anything was computed."""
    with running_server(scoring_engine, limits={"max_response_size": 1 << 18}) as server:
        body = {"prompt": [5] * 900, "max_tokens": 1}
        assert server.post(COMPLETION, body | {"n": 8}).status_code == 200
        error = server.post(COMPLETION, body | {"n": 40, "stream": True}).json()["error"]
        assert (error["code"], error["param"]) == ("response_too_large", "n")


def test_a_prompt_is_scored_once_for_all_its_choices(server: RunningServer) -> None:
    alone = server.post(COMPLETION, {"prompt": [494] * 40, "max_tokens": 1, "prompt_logprobs": 20}).json()["choices"][0]
    answer = server.post(COMPLETION, {"prompt": [494] * 40, "n": 3, "max_tokens": 1, "prompt_logprobs": 20}).json()
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [alone["prompt_logprobs"]] * 3
    echoed = {"prompt": [[494] * 40, [494] * 9], "n": 2, "max_tokens": 0, "logprobs": 2, "echo": True}
    answer = server.post(COMPLETION, echoed).json()
    assert [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]] == [40, 40, 9, 9]
    assert [len(choice["logprobs"]["top_logprobs"]) for choice in answer["choices"]] == [40, 40, 9, 9]


def test_a_stream_keeps_no_logprobs_that_it_has_sent(server: RunningServer) -> None:
    with server.openai().completions.create(
        model="a-model", prompt=[494] * 20, max_tokens=200, logprobs=20, stream=True
    ) as stream:
        kept = 0
        for _ in stream:
            for one in server.client._client._streams.values():
                kept = max(kept, len(one.output.logprobs or ()) - len(one._delta.token_ids if one._delta else ()))
    assert kept <= 1


def test_pieces_are_the_same_json() -> None:
    numbers = Rows(range(100_000), lambda number: {"a": number}, is_shared=True)
    value = {"b": [], "c": {}, "d": [{"e": numbers}, {"e": numbers}], "f": Rows([], str), "g": [1, None], "h": "\x01é"}
    pieces = list(json_pieces(value))
    assert b"".join(pieces) == encode_json(value)
    assert len(pieces) > 1
    assert max(map(len, pieces)) < 2 * PIECE_BYTES
