"""Ollama's API: shapes of its responses, what its fields mean, and the calls of programs that are made for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from evenflow.server.api.ollama.request import OllamaChatBody, OllamaGenerateBody
from tests.server.serving import MODEL, RunningServer, scripted_server

CHAT, GENERATE = "/api/chat", "/api/generate"
SCRIPT = "It is 20° in Zürich, they say. "
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "a\\"b"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
USER = [{"role": "user", "content": "How is it?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT, max_model_len=256) as running:
        yield running


@pytest.fixture(scope="module")
def caller() -> Iterator[RunningServer]:
    with scripted_server(script=CALLS + "<|end|>") as running:
        yield running


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.post(path, {"model": MODEL, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def whole(server: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = server.post(path, {"model": MODEL, "stream": False, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    found: dict[str, Any] = response.json()
    return found


def test_a_chat_streams_lines_unless_asked_otherwise(server: RunningServer) -> None:
    body = {"messages": USER, "options": {"num_predict": 20, "temperature": 0}}
    *parts, last = lines(server, CHAT, body)
    one = whole(server, CHAT, body)
    text = "".join(part["message"]["content"] for part in parts)
    assert text == one["message"]["content"] != ""
    assert SCRIPT.startswith(text[:20])
    assert {part["done"] for part in parts} == {False}
    for end in (last, one):
        assert (end["done"], end["done_reason"], end["eval_count"]) == (True, "length", 20)
        assert end["prompt_eval_count"] > 0
        assert end["total_duration"] > end["eval_duration"] > 0
        assert end["prompt_eval_duration"] > 0
        assert end["model"] == MODEL
        assert datetime.fromisoformat(end["created_at"]).tzinfo is not None
    assert last["message"] == {"role": "assistant", "content": ""}


def test_a_text_is_generated_with_and_without_the_chat_template(server: RunningServer) -> None:
    options = {"num_predict": 5}
    *parts, last = lines(server, GENERATE, {"prompt": "Hello", "system": "Be brief.", "options": options})
    assert "".join(part["response"] for part in parts)
    assert last["response"] == ""
    raw = whole(server, GENERATE, {"prompt": "Hello", "raw": True, "options": options})
    assert 0 < raw["prompt_eval_count"] < last["prompt_eval_count"]
    assert raw["eval_count"] == last["eval_count"] == 5
    endless = whole(server, GENERATE, {"prompt": "Hello", "raw": True, "options": {"num_predict": -1}})
    assert endless["prompt_eval_count"] + endless["eval_count"] == 256
    assert endless["done_reason"] == "length"


def test_a_stop_text_ends_the_answer(server: RunningServer) -> None:
    one = whole(server, CHAT, {"messages": USER, "options": {"stop": ["Zürich"], "num_predict": 100}})
    assert "Zürich" not in one["message"]["content"]
    assert one["done_reason"] == "stop"


def test_calls_have_parsed_arguments_and_come_whole(caller: RunningServer) -> None:
    body = {"messages": USER, "tools": [TOOL], "options": {"num_predict": len(CALLS.encode())}}
    expected = [{"function": {"name": "look", "arguments": arguments}} for arguments in ({"at": 'a"b'}, {})]
    one = whole(caller, CHAT, body)
    assert one["message"]["tool_calls"] == expected
    assert one["message"]["content"].strip() == "I look."
    parts = lines(caller, CHAT, body)
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == expected
    assert "".join(part["message"]["content"] for part in parts).strip() == "I look."
    assert "tool_calls" not in parts[-1]["message"]


def test_a_conversation_with_calls_becomes_a_chat() -> None:
    call = {"function": {"name": "look", "arguments": {"at": "a"}}}
    body = OllamaChatBody.model_validate(
        {
            "model": "m",
            "messages": [*USER, {"role": "assistant", "tool_calls": [call, call], "thinking": "Hm."}]
            + [{"role": "tool", "tool_name": "look", "content": result} for result in ("rain", "sun")],
            "tools": [TOOL],
            "think": "high",
        }
    )
    chat = body.chat("m")
    _, asked, first, second = (message.model_dump(exclude_none=True) for message in chat.messages)
    assert [one["id"] for one in asked["tool_calls"]] == ["call_0", "call_1"]
    assert asked["reasoning_content"] == "Hm."
    assert [(one["tool_call_id"], one["name"]) for one in (first, second)] == [("call_0", "look"), ("call_1", "look")]
    assert chat.reasoning_effort == "high"


def test_options_and_formats_mean_what_they_mean_in_ollama() -> None:
    plain = OllamaChatBody.model_validate({"model": "m", "messages": USER}).chat("m")
    assert (plain.temperature, plain.top_p, plain.top_k, plain.max_tokens, plain.stream) == (0.8, 0.9, 40, None, True)
    options = {"temperature": 0, "seed": 5, "stop": "x", "top_k": 3, "top_p": 0.5, "num_predict": 7, "min_p": 0.1}
    more = {"repeat_penalty": 1.1, "num_ctx": 8192, "num_gpu": 1}
    schema = {"type": "object"}
    body = {"model": "m", "prompt": "a", "options": options | more, "format": schema, "think": False, "tenant": "t"}
    chat = OllamaGenerateBody.model_validate(body).chat("m")
    assert (chat.temperature, chat.seed, chat.stop, chat.top_k, chat.top_p) == (0, 5, "x", 3, 0.5)
    assert (chat.max_tokens, chat.min_p, chat.repetition_penalty, chat.tenant) == (7, 0.1, 1.1, "t")
    assert chat.guided_json == schema
    assert chat.chat_template_kwargs == {"enable_thinking": False}
    assert OllamaGenerateBody.model_validate({**body, "format": "json"}).chat("m").grammar is not None


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (CHAT, {"model": "other", "messages": USER}, 404, "'other' is not served"),
        (CHAT, {"messages": USER}, 400, "model"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images"),
        (CHAT, {"model": MODEL, "messages": USER, "options": {"mirostat": 1}}, 400, "options.mirostat"),
        (CHAT, {"model": MODEL, "messages": USER, "options": {"num_predict": 0}}, 400, "num_predict"),
        (CHAT, {"model": MODEL, "messages": USER, "nonsense": 1}, 400, "nonsense"),
        (CHAT, {"model": MODEL, "messages": [{"role": "user", "content": "a" * 5000}]}, 400, "context"),
        (GENERATE, {"model": MODEL, "prompt": "a", "suffix": "b"}, 400, "suffix"),
        (GENERATE, {"model": MODEL, "prompt": "a", "template": "x"}, 400, "template"),
        ("/api/show", {}, 400, "model"),
        ("/api/show", {"model": "other"}, 404, "other"),
        ("/api/pull", {"model": MODEL}, 404, "Not Found"),
    ],
)
def test_errors_have_ollamas_form(
    server: RunningServer, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    refused = server.post(path, body)
    assert refused.status_code == status
    assert list(refused.json()) == ["error"]
    assert said in refused.json()["error"]


def test_keys_and_their_errors() -> None:
    with scripted_server(settings={"api_keys": ["a"]}) as server:
        refused = server.post(CHAT, {"model": MODEL, "messages": USER})
        assert refused.status_code == 401
        assert list(refused.json()) == ["error"]
        assert server.get("/api/tags").status_code == 401
        assert server.get("/api/tags", headers={"Authorization": "Bearer a"}).status_code == 200


def test_what_open_webui_and_editors_ask_for(server: RunningServer) -> None:
    """The calls that they document: models, their abilities, loading one, then a chat by the name of the list."""
    version = server.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) > (0, 6, 4)  # that editors ask for at least
    tags = server.get("/api/tags").json()["models"]
    assert [one["name"] for one in tags] == [MODEL, "another-name"]
    assert {"name", "model", "modified_at", "size", "digest", "details"} <= set(tags[0])
    assert [one["name"] for one in server.get("/api/ps").json()["models"]] == [MODEL, "another-name"]
    for name in (MODEL, f"{MODEL}:latest"):
        about = server.post("/api/show", {"model": name}).json()
        assert about["capabilities"] == ["completion", "tools"]
        architecture = about["model_info"]["general.architecture"]
        assert about["model_info"][f"{architecture}.context_length"] == 256
        loaded = server.post(GENERATE, {"model": name, "keep_alive": "5m"}).json()
        assert (loaded["done"], loaded["done_reason"], loaded["response"]) == (True, "load", "")
        body = {"messages": USER, "keep_alive": -1, "options": {"num_predict": 2}}
        assert lines(server, CHAT, {**body, "model": name})[-1]["model"] == name
    assert server.post(CHAT, {"model": MODEL, "messages": []}).json()["done_reason"] == "load"
