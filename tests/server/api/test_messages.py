"""/v1/messages as plain HTTP: responses, events and errors have the form of Anthropic's API."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from evenflow.server.api.messages import models
from tests.clients import agent_trace
from tests.server.engines import MAX_MODEL_LEN
from tests.server.serving import MODEL, RunningServer, scripted_server, small_tokenizer

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
SCRIPT = "It is 20° in Zürich, they say. "
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a\\"b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": "How is it?"}]}
TOOLS = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT, settings={"limits": {"max_body_size": 100_000}}) as running:
        yield running


@pytest.fixture(scope="module")
def caller() -> Iterator[RunningServer]:
    """Its model says a word and makes two calls."""
    with scripted_server(script=CALLS + "<|end|>") as running:
        yield running


def message(server: RunningServer, **changes: Any) -> dict[str, Any]:
    response = server.post(PATH, {**BODY, **changes})
    assert response.status_code == 200, response.text
    models.Message.model_validate_json(response.content, strict=True)
    assert response.headers["request-id"].startswith("req_")
    found: dict[str, Any] = response.json()
    return found


def events(
    server: RunningServer, body: dict[str, Any], path: str = PATH, headers: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Each has the name of its type."""
    response = server.post(path, {**body, "stream": True}, headers=headers)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for written in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = written.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def put_together(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as clients make it."""
    assert [stream[0]["type"], stream[1]["type"], stream[-1]["type"]] == ["message_start", "ping", "message_stop"]
    whole = stream[0]["message"]
    assert (whole["content"], whole["stop_reason"]) == ([], None)
    inputs: dict[int, str] = {}
    is_open = False
    for event in stream[2:-1]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(whole["content"])
                whole["content"].append(event["content_block"])
                is_open = True
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                assert is_open
                assert event["index"] == len(whole["content"]) - 1
                whole["content"][-1]["text"] += event["delta"]["text"]
            case "content_block_delta":
                assert is_open
                assert event["delta"]["type"] == "input_json_delta"
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_stop":
                assert is_open
                assert event["index"] == len(whole["content"]) - 1
                is_open = False
            case "message_delta":
                assert not is_open
                whole |= event["delta"] | {"usage": event["usage"]}
    for index, text in inputs.items():
        whole["content"][index]["input"] = json.loads(text)
    return dict(whole)


def test_a_message_is_answered(server: RunningServer) -> None:
    num_tokens = len(small_tokenizer().encode(SCRIPT, add_special_tokens=False))
    found = message(server, max_tokens=num_tokens)
    assert found["id"].startswith("msg_")
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", MODEL)
    assert found["content"] == [{"type": "text", "text": SCRIPT}]
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    assert found["usage"]["output_tokens"] == num_tokens


def test_a_stream_is_the_same_message(server: RunningServer) -> None:
    whole, streamed = message(server), put_together(events(server, BODY))
    for name in ("content", "stop_reason", "stop_sequence", "model"):
        assert streamed[name] == whole[name]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"stop_sequences": ["I", "t"]}], ids=["length", "stop"])
def test_a_stream_that_ends_with_its_first_token_begins_without_an_end(
    server: RunningServer, changes: dict[str, Any]
) -> None:
    start, *_, delta, _ = events(server, {**BODY, **changes})
    assert (start["message"]["stop_reason"], start["message"]["stop_sequence"]) == (None, None)
    assert delta["delta"] == {name: message(server, **changes)[name] for name in ("stop_reason", "stop_sequence")}


def test_the_stop_sequence_that_ended_it_is_named(server: RunningServer) -> None:
    changes = {"stop_sequences": ["never", "they", "Zürich, th"], "max_tokens": 100}
    whole, streamed = message(server, **changes), put_together(events(server, {**BODY, **changes}))
    for found in (whole, streamed):
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "Zürich, th")
        assert found["content"] == [{"type": "text", "text": "It is 20° in "}]


def test_the_context_bounds_the_output(server: RunningServer) -> None:
    """Coding agents ask for 32,000 tokens of any model."""
    found = message(server, max_tokens=32_000)
    usage = found["usage"]
    assert found["stop_reason"] == "model_context_window_exceeded"
    assert sum(usage.values()) == MAX_MODEL_LEN
    assert server.post(PATH, {**BODY, "system": "a " * 2000}).status_code == 400


def test_cached_tokens_are_counted_apart(server: RunningServer) -> None:
    body = {**BODY, "system": "Be brief. " * 20, "max_tokens": 1}
    first, second = (server.post(PATH, body).json()["usage"] for _ in range(2))
    counted = server.post(COUNT, {name: body[name] for name in ("model", "messages", "system")})
    assert models.InputTokens.model_validate_json(counted.content).input_tokens == first["input_tokens"]
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] > 100
    assert second["input_tokens"] + second["cache_read_input_tokens"] == first["input_tokens"]
    assert first["cache_creation_input_tokens"] == 0


def test_calls_are_blocks_with_parsed_input(caller: RunningServer) -> None:
    whole = message(caller, tools=TOOLS, max_tokens=200)
    stream = events(caller, {**BODY, "tools": TOOLS, "max_tokens": 200})
    for found in (whole, put_together(stream)):
        assert found["stop_reason"] == "tool_use"
        text, first, second = found["content"]
        assert text == {"type": "text", "text": "I look."}
        assert (first["type"], first["name"], first["input"]) == ("tool_use", "look", {"at": 'a"b'})
        assert (second["name"], second["input"]) == ("look", {})
        assert first["id"] != second["id"]
    assert len([event for event in stream if event.get("delta", {}).get("type") == "input_json_delta"]) > 3


def test_one_call_if_no_more_are_wanted(caller: RunningServer) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    found = message(caller, tools=TOOLS, tool_choice=choice, max_tokens=200)
    assert [block["type"] for block in found["content"]] == ["text", "tool_use"]


def test_text_that_is_no_call_without_tools(caller: RunningServer) -> None:
    for changes in ({}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
        found = message(caller, max_tokens=200, **changes)
        assert (found["content"], found["stop_reason"]) == ([{"type": "text", "text": CALLS}], "end_turn")


def test_a_call_that_is_cut_off_keeps_what_it_has(caller: RunningServer) -> None:
    num_tokens = len(small_tokenizer().encode(CALLS[: CALLS.index("b") - 2], add_special_tokens=False))
    found = message(caller, tools=TOOLS, max_tokens=num_tokens)
    assert found["stop_reason"] == "max_tokens"
    assert found["content"][1]["input"]["INVALID_JSON"].startswith('{"at": "')


def test_text_after_a_call_is_a_block_of_its_own() -> None:
    script = '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>\nDone.<|end|>'
    with scripted_server(script=script) as server:
        whole = message(server, tools=TOOLS, max_tokens=200)
        stream = put_together(events(server, {**BODY, "tools": TOOLS, "max_tokens": 200}))
    for found in (whole, stream):
        assert [block["type"] for block in found["content"]] == ["tool_use", "text"]
        assert found["content"][1]["text"].strip() == "Done."


def test_a_coding_agents_session() -> None:
    """Every turn is taken whole, and reads the one before from the cache."""
    call = '<tool_call>\n{"name": "Read", "arguments": {"file_path": "/src/4.py", "limit": 20}}\n</tool_call><|end|>'
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "any"}
    cached = []
    with scripted_server(script=call, max_model_len=40_000) as server:
        for number, num_turns in enumerate((1, 3, 5)):
            body = agent_trace.request(MODEL, num_turns, billing=str(number))
            asked = {name: body[name] for name in ("model", "messages", "system", "tools", "thinking")}
            counted = server.post(COUNT, asked, headers=headers).json()
            found = put_together(events(server, body, PATH + "?beta=true", headers))
            assert found["stop_reason"] == "tool_use"
            assert found["content"][0]["input"] == {"file_path": "/src/4.py", "limit": 20}
            usage = found["usage"]
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
            cached.append(usage["cache_read_input_tokens"])
    assert cached[0] == 0
    assert 1000 < cached[1] < cached[2]


REFUSED: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "other"}, 404, "not_found_error", "The model 'other' is not served"),
    ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"temprature": 1}, 400, "invalid_request_error", "Unknown field: temprature"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error",
     "messages[0].content[0]: got type 'image' but expected 'text', 'tool_use'"),
    ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, 400, "invalid_request_error", "got type None"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, 400, "invalid_request_error",
     "messages[0].content[0]"),
    ({"messages": [{"role": "tool", "content": "a"}]}, 400, "invalid_request_error", "got 'tool' but expected 'user'"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, 400,
     "invalid_request_error", "only the assistant has them"),
    ({"messages": [*BODY["messages"], {"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, 400, "invalid_request_error",
     "last message to continue that is not text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, 400,
     "invalid_request_error", "no tool_use before it has this id"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error",
     "tools[0]: got type 'web_search_20250305'"),
    ({"tools": [{"name": "a"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
    ({"tools": TOOLS * 2}, 400, "invalid_request_error", "two tools with the name 'look'"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "expected a name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "go"}}, 400, "invalid_request_error",
     "the tools are: look"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "'any' but no tools"),
    ({"mcp_servers": [{"url": "https://example.org"}]}, 400, "invalid_request_error", "mcp_servers: this server calls"),
    ({"container": "c"}, 400, "invalid_request_error", "container: this server runs no containers"),
    ({"system": "a" * 200_000}, 413, "request_too_large", "100000"),
]  # fmt: skip


def check_error(response: httpx.Response, status: int, kind: str) -> str:
    assert response.status_code == status, response.text
    body = models.MessageErrorBody.model_validate_json(response.content, strict=True)
    assert body.error.type == kind
    assert body.request_id == response.headers["request-id"]
    return body.error.message


@pytest.mark.parametrize(("changes", "status", "kind", "words"), REFUSED)
def test_it_is_refused_with_a_reason(
    server: RunningServer, changes: dict[str, Any], status: int, kind: str, words: str
) -> None:
    assert words in check_error(server.post(PATH, {**BODY, **changes}), status, kind)


def test_mutated_bodies_harm_nothing(server: RunningServer) -> None:
    """Any body gets a response or a refusal, and the server stays healthy."""
    source = random.Random(7)
    odd: list[Any] = [None, True, -1, 0, 2**70, 1e308, "", "x" * 300, [], {}, [[]], [None], {"type": 1}, "\ud800", -0.0]
    headers = {"content-type": "application/json"}
    blocks = agent_trace.TURNS[1]["content"] + agent_trace.TURNS[2]["content"]
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for _ in range(300):
            body = {**agent_trace.request(MODEL, source.choice((1, 3, 5))), "max_tokens": 2, "system": "a"}
            body = json.loads(json.dumps({**body, "tools": body["tools"][:1], "stream": source.random() < 0.3}))
            places: list[Any] = [body, body["messages"][-1], body["tools"][0], body["thinking"]]
            places += [block for turn in body["messages"] for block in turn["content"]]
            place = source.choice(places)
            place[source.choice([*place, "tool_choice", "output_config"])] = source.choice([*odd, blocks])
            content = json.dumps(body).encode()
            response = client.post(source.choice((PATH, COUNT)), content=content, headers=headers)
            assert response.status_code in (200, 400, 404), (content, response.text)
            if response.status_code != 200:
                kind = "not_found_error" if response.status_code == 404 else "invalid_request_error"
                check_error(response, response.status_code, kind)
    server.until(lambda: server.client.num_open == 0 and server.server.service.gate.num_inside == 0)


def test_errors_before_the_handler_have_the_same_form(server: RunningServer) -> None:
    headers = {"content-type": "application/json"}
    for path in (PATH, COUNT):
        check_error(server.post(path, content=b"{", headers=headers), 400, "invalid_request_error")
        check_error(
            server.post(path, content=b"{}", headers={"content-type": "text/plain"}), 415, "invalid_request_error"
        )
        check_error(server.get(path), 405, "invalid_request_error")
        check_error(server.post(path, BODY, headers={"Host": "evil.example"}), 403, "permission_error")
    check_error(server.post(PATH + "/batches", BODY), 404, "not_found_error")
    assert "type" not in server.get("/v1/messages_other").json()
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 200 + b"\r\n")
        received = b""
        while data := connection.recv(1 << 16):
            received += data
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert models.MessageErrorBody.model_validate_json(content).error.type == "invalid_request_error"


def test_both_headers_carry_a_key() -> None:
    with scripted_server(settings={"api_keys": ["first", "second"]}) as server:
        assert "x-api-key" in check_error(server.post(PATH, BODY), 401, "authentication_error")
        wrong: list[dict[str, str]] = [
            {"x-api-key": "third"},
            {"x-api-key": ""},
            {"Authorization": "Bearer third", "x-api-key": "first"},
        ]
        for headers in wrong:
            check_error(server.post(PATH, BODY, headers=headers), 401, "authentication_error")
            check_error(server.post(COUNT, content=b"{", headers=headers), 401, "authentication_error")
        for headers in ({"x-api-key": "first"}, {"Authorization": "Bearer second", "x-api-key": "none"}):
            assert server.post(PATH, BODY, headers=headers).status_code == 200
        for key, cached in (("first", 16), ("second", 16)):  # each has its own prefix cache, whatever the header
            usage = server.post(PATH, BODY, headers={"x-api-key": key}).json()["usage"]
            assert usage["cache_read_input_tokens"] == cached
        security = server.get("/openapi.json").json()["paths"][PATH]["post"]["security"]
        assert security == [{"HTTPBearer": []}, {"APIKeyHeader": []}]


def test_limits_and_the_drain_hold_here_too() -> None:
    with scripted_server(step_s=0.05, settings={"limits": {"max_tenant_requests": 1}}) as server:
        with httpx.stream("POST", server.url + PATH, json={**BODY, "max_tokens": 900, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            for path in (PATH, COUNT):
                body = BODY if path == PATH else {name: BODY[name] for name in ("model", "messages")}
                check_error(server.post(path, body), 429, "rate_limit_error")
        server.until(lambda: server.client.num_open == 0)
        server.server.service.gate.is_draining = True
        response = server.post(PATH, BODY)
        check_error(response, 503, "overloaded_error")
        assert response.headers["retry-after"]


def test_a_failure_within_a_stream_is_an_event() -> None:
    body = {**BODY, "max_tokens": 900, "stream": True}
    with (
        scripted_server(step_s=0.02) as server,
        httpx.stream("POST", server.url + PATH, json=body, timeout=30) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        server.server.should_exit = True
        rest = [line for line in lines if line]
    assert rest[-2] == "event: error"
    error = models.MessageErrorBody.model_validate_json(rest[-1].removeprefix("data: "))
    assert error.error.type == "overloaded_error"
