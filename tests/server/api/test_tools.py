"""Tools as a chat offers them: the choice, the grammar that makes calls valid, the parser that finds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from evenflow import LLM, Grammar, SamplingParams
from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ToolStyle
from evenflow.model.text.grammar import Grammars
from evenflow.server.api.tool_stream import whole_message
from evenflow.server.api.tools import ToolFields, ToolUse
from tests.models import tiny_llama

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["C", "F"]},
        "days": {"$ref": "#/$defs/days"},
    },
    "required": ["city", "unit"],
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "now"}}


def tool_use(style: ToolStyle = ToolStyle.HERMES, answer: Grammar | None = None, **fields: Any) -> ToolUse:
    return ToolFields.model_validate({"tools": TOOLS, **fields}).tool_use(style, answer)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_llama(), max_steps_in_flight=2) as llm:
        yield llm


def answer_to(llm: LLM, use: ToolUse, seed: int, temperature: float = 1.0) -> tuple[dict[str, Any], str]:
    """The message that comes of a model of random weights, and its text."""
    assert use.grammar is not None
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=200, grammar=use.grammar)
    [output] = llm.generate([[7, 8, 9]], sampling)
    assert output.finish_reason == "stop", output
    stream = use.new_stream()
    assert stream is not None
    return whole_message(stream.push(output.text, is_last=True)), output.text


def check_calls(message: dict[str, Any]) -> list[str]:
    """The names of the calls, whose arguments must be valid."""
    assert message["content"] is None
    functions = [call["function"] for call in message["tool_calls"]]
    for function in functions:
        jsonschema.validate(json.loads(function["arguments"]), SCHEMAS[function["name"]])
    return [function["name"] for function in functions]


@pytest.mark.parametrize("style", ToolStyle)
def test_required_calls_parse_and_validate(llm: LLM, style: ToolStyle) -> None:
    use = tool_use(style, tool_choice="required")
    names = [check_calls(answer_to(llm, use, seed)[0]) for seed in range(12)]
    assert {len(called) for called in names} == {1}
    assert {name for called in names for name in called} == {"get_weather", "now"}


@pytest.mark.parametrize("style", ToolStyle)
def test_a_named_function_is_the_one_that_is_called(llm: LLM, style: ToolStyle) -> None:
    for temperature in (0.0, 1.0):
        message, _ = answer_to(llm, tool_use(style, tool_choice=NAMED), seed=1, temperature=temperature)
        assert check_calls(message) == ["now"]


def test_several_calls_where_they_are_asked_for(llm: LLM) -> None:
    tools = [{"type": "function", "function": {"name": "now"}}]
    use = tool_use(ToolStyle.MISTRAL, tools=tools, tool_choice="required", parallel_tool_calls=True)
    counts = {len(check_calls(answer_to(llm, use, seed)[0])) for seed in range(12)}
    assert len(counts) > 1
    assert max(counts) <= 16


@pytest.mark.parametrize("parallel", [True, False])
def test_a_second_call_in_marks_of_its_own(llm: LLM, parallel: bool) -> None:
    grammar = tool_use(tool_choice="required", parallel_tool_calls=parallel).grammar
    assert grammar is not None
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    constraint = Grammars(llm.tokenizer, 512).constrain(grammar)
    tokens = llm.tokenizer.encode(call, add_special_tokens=False)
    [line] = llm.tokenizer.encode("\n", add_special_tokens=False)
    assert constraint.allowed(tokens, 0)[line] == parallel
    assert constraint.allowed(tokens, 0)[list(llm.tokenizer.eos_token_ids)].all()


def test_an_answer_by_a_schema_or_a_call(llm: LLM) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    use = tool_use(answer=Grammar.json_schema(schema))
    messages = [answer_to(llm, use, seed) for seed in range(12)]
    for message, text in messages:
        if "tool_calls" in message:
            check_calls(message)
        else:
            jsonschema.validate(json.loads(text), schema)
    assert {"tool_calls" in message for message, _ in messages} == {True, False}


def test_the_choice_decides_what_is_rendered_and_parsed() -> None:
    answer = Grammar.regex("a")
    none = tool_use(tool_choice="none", answer=answer)
    assert (none.tools, none.grammar, none.new_stream()) == (None, answer, None)
    without = ToolFields().tool_use(ToolStyle.HERMES, answer)
    assert (without.tools, without.grammar, without.new_stream()) == (None, answer, None)
    auto = tool_use(tool_choice="auto")
    assert auto == tool_use()
    assert auto.grammar is None
    assert auto.new_stream() is not None
    assert auto.tools == [TOOLS[0], {"type": "function", "function": {"name": "now"}}]


def test_one_call_only() -> None:
    stream = tool_use(parallel_tool_calls=False).new_stream()
    assert stream is not None
    call = '<tool_call>{"name": "now"}</tool_call>'
    assert len(whole_message(stream.push(call * 2, is_last=True))["tool_calls"]) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "'nope' but the tools are: get_weather"),
        ({"tools": [TOOLS[0]] * 2}, "two tools with the name 'get_weather'"),
        ({"tools": None, "tool_choice": "required"}, "'required' but no tools"),
        ({"tools": [], "tool_choice": NAMED}, "the tools are: none"),
        ({"answer": Grammar.regex("a")}, "tools and a regex"),
        ({"answer": Grammar.json_schema("{")}, "json_schema cannot be used"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        tool_use(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "not a name"}}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "sometimes"},
    ],
)
def test_fields_that_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ToolFields.model_validate(fields)


def test_parameters_that_cannot_be_enforced_are_named(llm: LLM) -> None:
    function = {"name": "f", "parameters": {"type": "object", "not": {}}}
    use = tool_use(tools=[{"type": "function", "function": function}], tool_choice="required")
    with pytest.raises(InvalidRequest, match="Unimplemented keys"):
        llm.generate([[1]], SamplingParams(grammar=use.grammar))
