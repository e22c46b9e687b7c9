"""Which grammar a body asks for."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from evenflow import Grammar, SamplingParams
from evenflow.core.request import Request
from evenflow.engine.messages import Add, read_command
from evenflow.errors import InvalidRequest
from evenflow.framing import FrameReader, frame
from evenflow.server.api.response_format import GrammarFields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "thing", "schema": SCHEMA, "strict": True}


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_json": '{"type": "integer"}'}, Grammar.json_schema({"type": "integer"})),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["yes", "no"]}, Grammar.choice(["yes", "no"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar.choice(["yes", "no"])),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
)
def test_the_grammar_of_a_body(body: dict[str, Any], grammar: Grammar | None) -> None:
    assert GrammarFields.model_validate(body).grammar == grammar


def test_two_of_them_contradict_each_other() -> None:
    body = {"response_format": {"type": "json_object"}, "guided_regex": "a+", "structured_outputs": {"choice": ["a"]}}
    with pytest.raises(InvalidRequest, match=r"response_format and structured_outputs\.choice and guided_regex"):
        _ = GrammarFields.model_validate(body).grammar


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"structural_tag": "{}"}},
        {"structured_outputs": {"grammar": 5}},
        {"guided_grammar": 5},
        {"guided_choice": []},
    ],
)
def test_what_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GrammarFields.model_validate(body)


def test_a_grammar_crosses_to_the_engine_process() -> None:
    sampling = SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    sent = Add(Request("a", [1, 2], sampling, seed=0, max_model_len=50).record())
    [content] = FrameReader().feed(frame(sent))
    received = read_command(content)
    assert isinstance(received, Add)
    assert received.request.sampling == sampling
