"""What an answer must look like, as a request says it."""

from __future__ import annotations

import json

import pytest

from evenflow import Grammar, SamplingParams
from evenflow.core.request import Request, RequestRecord
from evenflow.errors import InvalidRequest
from evenflow.executors.recorded import read, write_line


def test_schemas_and_choices_are_kept_as_json() -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    assert json.loads(Grammar.json_schema(schema).text) == schema
    assert Grammar.json_schema(json.dumps(schema, ensure_ascii=False)) == Grammar.json_schema(schema)
    assert json.loads(Grammar.choice(["yes", "no"]).text) == ["yes", "no"]


def test_equal_grammars_are_one_key() -> None:
    assert len({Grammar.regex("a+"), Grammar.regex("a+"), Grammar.lark("a+")}) == 2


@pytest.mark.parametrize("choice", [[], ["yes", ""], "yes", ["yes", 1]])
def test_what_is_no_choice(choice: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="list of texts"):
        Grammar.choice(choice)


def test_bad_grammars_say_why() -> None:
    with pytest.raises(InvalidRequest, match="'xml' but expected one of json_schema, regex, choice, lark"):
        Grammar("xml", "<a/>")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="of 0 characters"):
        Grammar.regex("")
    with pytest.raises(InvalidRequest, match="of 100001 characters"):
        Grammar.regex("a" * 100_001)
    with pytest.raises(InvalidRequest, match="surrogate"):
        Grammar.choice(["\ud800"])
    with pytest.raises(InvalidRequest, match="of type dict"):
        Grammar("json_schema", {})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        Grammar.json_schema({"maximum": float("inf")})


def test_sampling_params_check_their_grammar() -> None:
    with pytest.raises(InvalidRequest, match=r"expected a Grammar, such as Grammar\.regex"):
        SamplingParams(grammar="[a-z]+")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="ignore_eos=True with a grammar"):
        SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)


def test_a_recorded_request_keeps_its_grammar() -> None:
    sampling = SamplingParams(grammar=Grammar.choice(["yes", "no"]))
    request = Request("a", [1, 2, 3], sampling, seed=0, max_model_len=100)
    assert read(json.loads(write_line(request.record())), RequestRecord).request().sampling == sampling
