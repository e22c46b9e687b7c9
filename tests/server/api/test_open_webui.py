"""Open WebUI's calls of Ollama- and OpenAI-compatible servers.

Not recorded from a run: written down from the code of open-webui 0.12.4, as the paths and fields that it sends (in its
wheel routers/ollama.py, openai.py, tasks.py and utils/payload.py). To run it, its package needs a hundred others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.serving import MODEL, RunningServer, scripted_server

SCRIPT = "Hello, this is it."
TAGGED = f"{MODEL}:latest"
USER = {"role": "user", "content": "hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
ALL_OPTIONS = {  # each field of its form of advanced parameters that Ollama has
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "mirostat": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5.0,
    "num_ctx": 2048,
    "num_batch": 512,
    "num_keep": 24,
    "num_predict": 8,
    "repeat_last_n": 64,
    "top_k": 40,
    "min_p": 0.0,
    "repeat_penalty": 1.1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "stop": ["zzz"],
    "num_gpu": 0,
    "use_mmap": True,
    "use_mlock": False,
    "num_thread": 2,
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(script=SCRIPT) as running:
        yield running


def lines(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", server.url + path, json=body, timeout=30, verify=False) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_a_connection_to_ollama_is_checked_and_its_models_are_listed(server: RunningServer) -> None:
    assert server.get("/api/version").json()["version"]
    tags = server.get("/api/tags").json()["models"]
    assert {"name", "model", "size", "digest", "details"} <= tags[0].keys()
    assert server.get("/api/ps").json()["models"][0]["expires_at"]
    shown = server.post("/api/show", {"name": MODEL, "model": MODEL}).json()
    assert "completion" in shown["capabilities"]


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "every option"])
def test_a_chat_over_ollama(server: RunningServer, options: dict[str, Any]) -> None:
    body = {"model": MODEL, "messages": [{"role": "system", "content": "Be brief."}, USER], "stream": True}
    found = lines(server, "/api/chat", {**body, "options": {"num_predict": 8, **options}})
    *pieces, last = found
    assert "".join(piece["message"]["content"] for piece in found).startswith(SCRIPT[:3])
    assert not any(piece["done"] for piece in pieces)
    assert last["done"]
    # It sums these into the usage that it shows below an answer.
    figures = ("eval_count", "eval_duration", "prompt_eval_count", "prompt_eval_duration", "load_duration")
    assert all(isinstance(last[name], int) for name in (*figures, "total_duration"))


def test_root_parameters_and_a_schema_over_ollama(server: RunningServer) -> None:
    body = {"model": TAGGED, "messages": [USER], "stream": False, "keep_alive": "5m", "think": False}
    assert server.post("/api/chat", {**body, "options": {"num_predict": 4}}).status_code == 200


def test_tools_over_ollama_have_calls_with_an_index(server: RunningServer) -> None:
    call = {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call], "thinking": "Let me see."},
        {"role": "tool", "content": "1", "tool_call_id": "call_1"},
    ]
    body = {"model": MODEL, "messages": messages, "stream": True, "tools": TOOLS, "options": {"num_predict": 4}}
    assert lines(server, "/api/chat", body)[-1]["done"]


def test_unloading_over_ollama_is_answered(server: RunningServer) -> None:
    answer = server.post("/api/generate", {"model": MODEL, "keep_alive": 0, "prompt": ""})
    assert (answer.status_code, answer.json()["done"]) == (200, True)


def test_a_connection_to_openai_and_its_chat(server: RunningServer) -> None:
    assert [one["id"] for one in server.get("/v1/models").json()["data"]] == [MODEL, "another-name"]
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "min_p": 0.0,
        "max_tokens": 8,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "reasoning_effort": "low",
        "seed": 1,
        "stop": ["zzz"],
        "logit_bias": {"5": 1},
    }
    usage = {"stream_options": {"include_usage": True}}
    events = server.events("/v1/chat/completions", {"model": MODEL, "messages": [USER], **given, **usage})
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
    assert text.startswith(SCRIPT[:3])
    assert events[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("max_tokens", [1000, 300, 4], ids=["title", "tags and follow-ups", "an emoji"])
def test_its_tasks_ask_for_whole_answers(server: RunningServer, max_tokens: int) -> None:
    body = {"model": MODEL, "messages": [USER], "stream": False, "max_tokens": min(max_tokens, 900)}
    answer = server.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"].startswith(SCRIPT[:3])
    ollama = {"model": MODEL, "messages": [USER], "stream": False, "options": {"num_predict": max_tokens}}
    assert server.post("/api/chat", ollama).json()["message"]["content"].startswith(SCRIPT[:3])


def test_tools_over_openai_come_back_as_text_parts_joined(server: RunningServer) -> None:
    call = {"id": "call_1", "type": "function", "index": 0, "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    body = {"model": MODEL, "messages": messages, "stream": True, "tools": TOOLS, "max_tokens": 4}
    assert server.events("/v1/chat/completions", body)


def test_a_model_that_is_not_there_is_said_in_each_form(server: RunningServer) -> None:
    ollama = server.post("/api/chat", {"model": "gone", "messages": [USER], "stream": True})
    assert (ollama.status_code, list(ollama.json())) == (404, ["error"])
    openai = server.post("/v1/chat/completions", {"model": "gone", "messages": [USER], "stream": True})
    assert (openai.status_code, openai.json()["error"]["code"]) == (404, "model_not_found")
