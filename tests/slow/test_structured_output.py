"""SmolLM2-135M within schemas: valid JSON and valid calls at every temperature, beside answers that are free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from evenflow import LLM, Grammar, SamplingParams
from evenflow.server.api.tool_stream import whole_message
from evenflow.server.api.tools import ToolFields
from tests.models import default_model_path

pytestmark = pytest.mark.slow

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1400, "maximum": 2100},
        "genres": {"type": "array", "items": {"enum": ["novel", "poetry", "science"]}, "minItems": 1, "maxItems": 3},
        "author": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 40}, "alive": {"type": "boolean"}},
            "required": ["name", "alive"],
            "additionalProperties": False,
        },
    },
    "required": ["title", "year", "genres", "author"],
    "additionalProperties": False,
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Describe a famous book as JSON."}]


@pytest.fixture(scope="module", params=["float32", "int4"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    settings = {"policy": "fixed:64", "max_steps_in_flight": 2, "weights": request.param}
    with LLM(default_model_path(), **settings) as llm:
        yield llm


def test_answers_are_valid_beside_free_ones(llm: LLM) -> None:
    grammar = Grammar.json_schema(BOOK)
    bound = [
        SamplingParams(temperature=t, seed=seed, max_tokens=250, grammar=grammar) for t in (0.0, 1.0) for seed in (1, 2)
    ]
    free = SamplingParams(temperature=0.0, max_tokens=30)
    outputs = llm.chat([ASK] * 5, [*bound, free])
    for output in outputs[:-1]:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), BOOK)
    # Beside as many others again: on some CPUs a layer of 4-bit weights rounds by how many rows are in the step.
    unbound = [dataclasses.replace(params, grammar=None, ignore_eos=True, max_tokens=30) for params in bound]
    assert outputs[-1].token_ids == llm.chat([ASK] * 5, [*unbound, free])[-1].token_ids


def test_a_required_call_is_valid(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "The weather in a city", "parameters": parameters}
    fields = ToolFields.model_validate(
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    assert llm.tokenizer.chat_template is not None
    use = fields.tool_use(llm.tokenizer.chat_template.tool_style, None)
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    prompt = llm.tokenizer.encode(
        llm.tokenizer.apply_chat_template(question, tools=use.tools), add_special_tokens=False
    )
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=80, grammar=use.grammar))
    stream = use.new_stream()
    assert stream is not None
    [call] = whole_message(stream.push(output.text, is_last=True))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
