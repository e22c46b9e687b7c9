"""Answers by a grammar, through the whole engine: valid, the same however they were computed, no cost to the others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from evenflow import LLM, AsyncLLM, Grammar, SamplingParams
from evenflow.engine.outputs import RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.model.loader import load_model
from tests.engine.fakes import fake_llm
from tests.models import stories260k_folder, tiny_llama

# Each is small enough for a model of random weights to come to its end.
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"anyOf": [{"const": "nothing"}, {"type": "integer", "minimum": -50, "maximum": 50}]},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"type": "null"}, {"const": 1}]}, "at": {"$ref": "#/$defs/point"}},
                "required": ["next", "at"],
                "additionalProperties": False,
            },
            "point": {"type": "string", "pattern": "^[0-9]{1,3},[0-9]{1,3}$"},
        },
        "$ref": "#/$defs/node",
    },
)
PROMPTS = [[number, *range(40, 75), number] for number in range(100, 100 + len(SCHEMAS))]


def by_schema(schema: dict[str, Any], **sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "seed": 11, **sampling}, grammar=Grammar.json_schema(schema))


def all_schemas(**sampling: Any) -> list[SamplingParams]:
    return [by_schema(schema, **sampling) for schema in SCHEMAS]


def check(outputs: list[RequestOutput]) -> None:
    for output, schema in zip(outputs, SCHEMAS, strict=True):
        assert output.finish_reason == "stop", output
        jsonschema.validate(json.loads(output.text), schema)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tiny_llama(), policy="unchunked") as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_valid(llm: LLM, temperature: float) -> None:
    for seed in range(5):
        check(llm.generate(PROMPTS, all_schemas(temperature=temperature, seed=seed)))


def test_answers_of_a_sentencepiece_model_are_valid(tmp_path: Path) -> None:
    with LLM(stories260k_folder(tmp_path)) as llm:
        for temperature in (0.0, 1.0):
            check(
                llm.generate(["Once upon a time"] * len(SCHEMAS), all_schemas(temperature=temperature, max_tokens=400))
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("knobs", [{"policy": "fixed:7"}, {"policy": "fixed:16", "max_steps_in_flight": 2}])
def test_neither_chunks_nor_steps_in_flight_change_an_answer(
    llm: LLM, temperature: float, knobs: dict[str, Any]
) -> None:
    params = all_schemas(temperature=temperature)
    expected = tokens_of(
        [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, params, strict=True)]
    )
    with LLM(tiny_llama(), **knobs) as other:
        outputs = other.generate(PROMPTS, params)
        check(outputs)
        assert tokens_of(outputs) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_forced_preemption_changes_nothing(depth: int) -> None:
    digits = Grammar.regex(r"([0-9]{3},){14}[0-9]")
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=80, grammar=digits)
    prompts = [[token] * 60 for token in (5, 6, 7)]
    with LLM(tiny_llama(), enable_prefix_caching=False) as llm:
        expected = llm.generate(prompts, params)
    model = load_model(tiny_llama()).config
    block_bytes = 16 * 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    knobs = {"enable_prefix_caching": False, "max_steps_in_flight": depth, "kv_cache_memory": 17 * block_bytes}
    with LLM(tiny_llama(), **knobs) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.engine.stats.totals.looked_up_tokens > 3 * 60  # somebody was admitted twice
    assert tokens_of(outputs) == tokens_of(expected)
    assert all(re.fullmatch(r"([0-9]{3},){14}[0-9]", output.text) for output in outputs)


@pytest.mark.parametrize("depth", [1, 2])
def test_free_answers_beside_constrained_ones_stay_as_they_are(depth: int) -> None:
    free = SamplingParams(temperature=0.8, seed=3, max_tokens=40, repetition_penalty=1.1)
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    mixed = [sampling for pair in zip([free] * 4, all_schemas(), strict=True) for sampling in pair]
    with LLM(tiny_llama(), policy="fixed:32", max_steps_in_flight=depth) as llm:
        alone = llm.generate(PROMPTS, free)
        outputs = llm.generate(prompts, mixed)
    assert tokens_of(outputs[::2]) == tokens_of(alone)
    check(outputs[1::2])


def test_penalties_and_cuts_stay_within_the_grammar(llm: LLM) -> None:
    harsh = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.8}
    check(llm.generate(PROMPTS, all_schemas(temperature=1.2, top_k=3, top_p=0.5, min_p=0.2, **harsh)))


def test_logprobs_are_those_of_the_model_not_of_the_mask(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, grammar=Grammar.choice(["yes", "no"]))
    [output] = llm.generate([PROMPTS[0]], sampling)
    assert output.text in ("yes", "no")
    [free] = llm.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))
    assert output.logprobs is not None
    assert free.logprobs is not None
    assert output.logprobs[0].top == free.logprobs[0].top
    assert output.logprobs[0].chosen.logprob < free.logprobs[0].chosen.logprob


def test_min_tokens_hold_an_end_back_only_where_the_grammar_can_go_on(llm: LLM) -> None:
    [output] = llm.generate([[1]], SamplingParams(min_tokens=12, max_tokens=12, grammar=Grammar.regex("(a|b)*")))
    assert len(output.token_ids) == 12
    assert re.fullmatch("[ab]{12,}", output.text)
    [output] = llm.generate([[1]], SamplingParams(min_tokens=12, max_tokens=12, grammar=Grammar.regex("[ab]{4}")))
    assert re.fullmatch("[ab]{4}", output.text)
    assert output.finish_reason == "stop"
    assert len(output.token_ids) <= 5  # before, the end came again and again until there were 12


def test_stop_strings_and_max_tokens_cut_an_answer_short(llm: LLM) -> None:
    digits = Grammar.regex("([0-9]-){30}")
    [output] = llm.generate([[1]], SamplingParams(max_tokens=50, seed=1, stop=("-",), grammar=digits))
    assert re.fullmatch("[0-9]", output.text)
    assert output.finish_reason == "stop"
    [output] = llm.generate([[1]], SamplingParams(max_tokens=5, seed=1, grammar=digits))
    assert output.finish_reason == "length"


def test_a_grammar_that_cannot_be_used_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="Invalid type: objekt"):
        llm.generate([[1], [2]], [SamplingParams(), by_schema({"type": "objekt"})])
    assert not llm.engine.has_work


def test_a_grammar_that_takes_too_long_ends_its_own_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.model.text.grammar._MAX_MASK_S", -1.0)
    free = SamplingParams(max_tokens=10, ignore_eos=True)
    failed, fine = llm.generate([[1], [2]], [SamplingParams(grammar=Grammar.regex("[0-9]{9}")), free])
    assert failed.finish_reason == "error"
    assert failed.error == "the grammar cannot go on after 0 tokens: it takes too long"
    assert fine.finish_reason == "length"


def test_leaving_a_constrained_stream_frees_it() -> None:
    async def main() -> str:
        async with AsyncLLM(tiny_llama(), max_steps_in_flight=2) as llm:
            async for _ in llm.stream([1], SamplingParams(max_tokens=200, grammar=Grammar.regex("[0-9]*"))):
                break
            answer = await llm.generate([1], SamplingParams(grammar=Grammar.choice(["yes", "no"])))
            return answer.text

    assert asyncio.run(main()) in ("yes", "no")


def test_an_engine_that_cannot_constrain_answers_says_so() -> None:
    with pytest.raises(InvalidRequest, match="cannot constrain"):
        fake_llm().prepare([1, 2], SamplingParams(grammar=Grammar.regex("a")))
