"""Answers by a schema and required calls, through HTTP, the gate and the engine process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict

from tests.models import tiny_hf_folder
from tests.server.serving import MODEL, RunningServer, model_server, scripted_server

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOL: Any = {"type": "function", "function": {"name": "make_person", "parameters": SCHEMA}}
MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tiny_hf_folder(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", max_position_embeddings=1024)
    with model_server(str(folder), max_steps_in_flight=2) as running:
        yield running


def test_answers_match_a_schema(server: RunningServer) -> None:
    with server.openai() as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=FORMAT, n=4, seed=1)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert choice.message.content is not None
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_completion_is_one_of_a_choice(server: RunningServer) -> None:
    body = {"prompt": "Is it?", "n": 3, "structured_outputs": {"choice": ["yes", "no"]}}
    answers = server.post(COMPLETIONS, body).json()
    assert {choice["text"] for choice in answers["choices"]} <= {"yes", "no"}
    assert {choice["finish_reason"] for choice in answers["choices"]} == {"stop"}


def test_a_response_matches_its_text_format(server: RunningServer) -> None:
    class Person(BaseModel):
        model_config = ConfigDict(extra="forbid")
        age: Literal[7, 8]

    with server.openai() as client:
        parsed = client.responses.parse(model=MODEL, input="Hi", text_format=Person)
        assert parsed.output_parsed is not None
        assert parsed.text is not None
        assert parsed.text.format is not None
        assert parsed.text.format.type == "json_schema"
        plain: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
        written = client.responses.create(model=MODEL, input="Hi", text=plain)
        jsonschema.validate(json.loads(written.output_text), SCHEMA)
        anything: Any = {"format": {"type": "json_object"}}
        written = client.responses.create(model=MODEL, input="Hi", text=anything, max_output_tokens=20)
        assert written.output_text.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "make_person"}])
def test_a_required_call_of_a_response_validates(server: RunningServer, choice: Any) -> None:
    tool: Any = {"type": "function", "name": "make_person", "parameters": SCHEMA, "strict": True}
    with (
        server.openai() as client,
        client.responses.stream(
            model=MODEL, input="Hi", tools=[tool], tool_choice=choice, max_output_tokens=150
        ) as stream,
    ):
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    assert "".join(pieces) == call.arguments
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "make_person"}}])
def test_required_calls_stream_in_pieces_and_validate(server: RunningServer, choice: Any) -> None:
    pieces, names, reason = [], [], None
    with server.openai() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, stream=True, seed=2, max_tokens=150
        )
        for chunk in stream:
            [answer] = chunk.choices
            assert not answer.delta.content
            for call in answer.delta.tool_calls or []:
                assert call.function is not None
                names += [call.function.name] if call.function.name else []
                pieces.append(call.function.arguments or "")
            reason = answer.finish_reason or reason
    assert (names, reason) == (["make_person"], "tool_calls")
    assert len(pieces) > 3
    jsonschema.validate(json.loads("".join(pieces)), SCHEMA)


def test_what_cannot_be_enforced_is_refused_with_its_reason(server: RunningServer) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    refused = server.post(CHAT, {"messages": MESSAGES, "response_format": bad})
    assert refused.status_code == 400
    assert "Invalid type: objekt" in refused.json()["error"]["message"]
    refused = server.post(COMPLETIONS, {"prompt": "Hi", "guided_regex": "(a"})
    assert refused.status_code == 400
    assert "unclosed group" in refused.json()["error"]["message"]
    refused = server.post(CHAT, {"messages": MESSAGES, "response_format": FORMAT, "ignore_eos": True})
    assert refused.status_code == 400


def test_an_engine_that_cannot_constrain_answers_refuses() -> None:
    with scripted_server(script="Hello") as server:
        refused = server.post(CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}})
        assert refused.status_code == 400
        assert "cannot constrain" in refused.json()["error"]["message"]
