"""Masks over real vocabularies: what they allow, where they end, and that they are keyed by position."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.formats.gguf_file import GgufFile
from evenflow.model.formats.gguf_tokenizer import read_gguf_tokenizer
from evenflow.model.formats.hf_folder import read_hf_folder
from evenflow.model.loader import load_model
from evenflow.model.text.grammar import Constraint, Grammars
from evenflow.model.text.tokenizer import Tokenizer
from tests.models import default_model_path, stories260k_folder, tiny_llama

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@cache
def byte_level() -> tuple[Tokenizer, Grammars]:
    tokenizer = load_model(tiny_llama()).tokenizer
    return tokenizer, Grammars(tokenizer, 512)


def allowed_ids(constraint: Constraint, output: list[int]) -> list[int]:
    """What may follow an answer to a prompt of two tokens."""
    ids: list[int] = np.flatnonzero(constraint.allowed([7, 7, *output], 2)).tolist()
    return ids


def follow(tokenizer: Tokenizer, constraint: Constraint, text: str) -> list[int]:
    """Write a text a token at a time, each of which must be allowed."""
    output: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        assert token in allowed_ids(constraint, output), (text, tokenizer.decode(output))
        output.append(token)
    return output


def random_answer(tokenizer: Tokenizer, constraint: Constraint, seed: int) -> str:
    choose = np.random.default_rng(seed).choice
    output: list[int] = []
    while len(output) < 500:
        token = int(choose(allowed_ids(constraint, output)))
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode([7, *output]).removeprefix(tokenizer.decode([7]))
        output.append(token)
    raise AssertionError(f"no end in sight: {tokenizer.decode(output)}")


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "gguf"])
def test_random_walks_through_a_schema_give_what_it_describes(kind: str, tmp_path: Path) -> None:
    if kind == "byte_level":
        tokenizer, grammars = byte_level()
    else:
        if kind == "sentencepiece":
            _, tokenizer, _ = read_hf_folder(stories260k_folder(tmp_path))
        else:
            tokenizer = read_gguf_tokenizer(GgufFile(default_model_path()))
        grammars = Grammars(tokenizer, tokenizer.vocab_size)
    for seed in range(20):
        person = json.loads(random_answer(tokenizer, grammars.constrain(Grammar.json_schema(PERSON)), seed))
        assert list(person) == ["name", "age"]
        assert len(person["name"]) <= 8
        assert isinstance(person["age"], int)


def test_an_answer_may_end_exactly_where_the_grammar_does() -> None:
    tokenizer, grammars = byte_level()
    constraint = grammars.constrain(Grammar.regex("(ab)+"))
    [a], [b] = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    end = list(tokenizer.eos_token_ids)
    assert allowed_ids(constraint, []) == [a]
    assert allowed_ids(constraint, [a]) == [b]
    assert allowed_ids(constraint, [a, b]) == sorted([a, *end])
    closed = grammars.constrain(Grammar.regex("ab"))
    assert allowed_ids(closed, [a, b]) == end
    assert allowed_ids(closed, [a, b, *end]) == end  # a step in flight samples once more


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.json_object(), '{"a": [1, null, {"b": "é\\n"}]}'),
        (Grammar.json_schema(PERSON), '{\n    "name": "Bob",\n    "age": 7\n}'),
        (Grammar.choice(["yes", "no", 'quote " and \\ and\nline', "你好"]), 'quote " and \\ and\nline'),
        (Grammar.choice(["yes", "no", "你好"]), "你好"),
        (Grammar.regex(r"/path/\d{2}"), "/path/42"),
        (Grammar.lark('start: "a" middle "b"\nmiddle: /[0-9]+/ | "x" middle'), "axx17b"),
        (Grammar.lark('root ::= "a" middle "b"\nmiddle ::= [0-9]+ | "x" middle'), "axx17b"),  # GBNF
    ],
)
def test_what_matches_may_be_written(grammar: Grammar, text: str) -> None:
    tokenizer, grammars = byte_level()
    constraint = grammars.constrain(grammar)
    output = follow(tokenizer, constraint, text)
    assert set(tokenizer.eos_token_ids) <= set(allowed_ids(constraint, output))


def may_be_written(grammar: Grammar, text: str) -> bool:
    tokenizer, grammars = byte_level()
    constraint, output = grammars.constrain(grammar), list[int]()
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed_ids(constraint, output):
            return False
        output.append(token)
    return tokenizer.eos_token_ids[0] in allowed_ids(constraint, output)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": -1.5, "exclusiveMaximum": -1}, "-1.25 -1.5", "-1 -1.0 -0.9 -1.6"),
        ({"exclusiveMinimum": 1.0, "maximum": 1.5}, "1.01 1.5", "1 1.0 1.6 0"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0.001 0.5", "0 0.0 -0.1 -0"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.001", "0 -0 -0.0 0.1"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5 0.9 0.999", "0 1 1.0"),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, "0 -0.9 0.9", "-1 1"),
        ({"allOf": [{"exclusiveMinimum": 1}, {"maximum": 1.5}]}, "1.1", "1 1.6"),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, "1.1", "1 1.6"),  # of older drafts
        ({"minimum": 1.2, "exclusiveMinimum": 1, "maximum": 1.5}, "1.2", "1 1.1"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "1.1", "1.000000000000000000001"),  # which is read as 1
        ({"type": "integer", "exclusiveMinimum": -1, "exclusiveMaximum": 3}, "0 2", "-1 3"),
        ({"type": "integer", "exclusiveMinimum": 2**55}, f"{2**55 + 64}", f"{2**55}"),
    ],
)
def test_an_exclusive_bound_is_not_reached(bounds: dict[str, object], inside: str, outside: str) -> None:
    grammar = Grammar.json_schema({"type": "number"} | bounds)
    assert [text for text in inside.split() if not may_be_written(grammar, text)] == []
    assert [text for text in outside.split() if may_be_written(grammar, text)] == []


def test_only_keywords_are_bounds() -> None:
    schema = {"properties": {"exclusiveMinimum": {"type": "integer"}, "const": {"exclusiveMinimum": 2, "maximum": 2.5}}}
    closed = {"type": "object", "required": ["const"], "additionalProperties": False}
    grammar = Grammar.json_schema(closed | schema)
    assert may_be_written(grammar, '{"exclusiveMinimum":1,"const":2.1}')
    assert not may_be_written(grammar, '{"const":2}')
    assert may_be_written(Grammar.json_schema({"const": {"exclusiveMinimum": 2}}), '{"exclusiveMinimum":2}')


def test_a_digit_is_an_ascii_digit_and_blanks_have_an_end() -> None:
    tokenizer, grammars = byte_level()
    first = allowed_ids(grammars.constrain(Grammar.regex(r"\d")), [])
    assert sorted(tokenizer.decode([token]) for token in first) == list("0123456789")
    constraint = grammars.constrain(Grammar.json_object())
    [space], [line] = (tokenizer.encode(blank, add_special_tokens=False) for blank in " \n")
    for start, follows in (("{", True), ("{ ", False), ("{\n ", True), ("{\n" + " " * 32, False)):
        output = follow(tokenizer, constraint, start)
        assert (space in allowed_ids(constraint, output)) is follows
        assert (line in allowed_ids(constraint, output)) is (start == "{")


def test_special_tokens_are_no_text() -> None:
    tokenizer, grammars = byte_level()
    first = allowed_ids(grammars.constrain(Grammar.regex(r"(.|\n)+")), [])
    assert len(first) > 100
    assert not any(map(tokenizer.is_special, first))


def test_the_name_of_a_special_token_is_text() -> None:
    tokenizer, grammars = byte_level()
    for text in ("<|im_end|>", "a<|end|>b"):
        assert random_answer(tokenizer, grammars.constrain(Grammar.choice([text])), 0) == text


def test_logits_beyond_the_vocabulary_are_never_allowed() -> None:
    tokenizer, _ = byte_level()
    constraint = Grammars(tokenizer, 600).constrain(Grammar.regex(r"(.|\n)*"))
    mask = constraint.allowed([7], 1)
    assert len(mask) == 600
    assert mask[:512].any()
    assert not mask[512:].any()


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8))
def test_masks_depend_on_the_answer_alone(lengths: list[int]) -> None:
    """The mask is that of a fresh start, however the answer grew, shrank or was recomputed."""
    tokenizer, grammars = byte_level()
    whole = tokenizer.encode('{"name": "Bobby", "age": 1234567}', add_special_tokens=False)
    constraint = grammars.constrain(Grammar.json_schema(PERSON))
    for length in lengths:
        fresh = grammars.constrain(Grammar.json_schema(PERSON))
        assert allowed_ids(constraint, whole[:length]) == allowed_ids(fresh, whole[:length])


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.json_schema({"type": "objekt"}), "the json_schema cannot be used: Invalid type: objekt"),
        (Grammar.json_schema({"not": {"type": "object"}}), "Unimplemented keys"),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "Unsatisfiable"),
        (Grammar.json_schema({"$ref": "https://example.org/schema.json"}), "not present in a registry"),
        (Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text matches it"),
        (Grammar.json_schema("[1]"), "Expecting object schema"),
        (Grammar.json_schema("{nonsense"), "the json_schema cannot be used"),
        (Grammar.json_schema('{"exclusiveMinimum": nonsense'), "the json_schema cannot be used"),
        (Grammar.json_schema({"type": "number", "minimum": "a", "exclusiveMinimum": 1}), "Expected f64 for 'minimum'"),
        (Grammar("choice", "{nonsense"), "the choice cannot be used"),
        (Grammar.json_schema('{"items":' * 5000 + "{}" + "}" * 5000), "recursion limit"),
        (Grammar.regex("(a"), "the regex cannot be used: .*unclosed group"),
        (Grammar.regex("(?=a)b"), "look-around"),
        (Grammar.lark("start: missing"), "unknown name"),
        (Grammar.lark("root ::= (("), "the lark cannot be used: Expected"),
    ],
)
def test_what_cannot_be_used_says_why_on_one_line(grammar: Grammar, message: str) -> None:
    _, grammars = byte_level()
    with pytest.raises(InvalidRequest, match=message) as raised:
        grammars.check(grammar)
    assert "\n" not in str(raised.value)
    with pytest.raises(InvalidRequest, match=message):  # the same error from the cache
        grammars.constrain(grammar).allowed([7], 1)


def test_a_hostile_schema_is_stopped_by_a_limit() -> None:
    _, grammars = byte_level()
    names = {f"k{number}": {"type": "string", "pattern": "^[a-z]{1,500}$"} for number in range(1500)}
    with pytest.raises(InvalidRequest, match="Too many items"):
        grammars.check(Grammar.json_schema({"type": "object", "properties": names}))


def test_a_grammar_that_turns_out_to_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    _, grammars = byte_level()
    constraint = grammars.constrain(Grammar.regex("[0-9]*"))
    constraint.allowed([7], 1)
    monkeypatch.setattr("evenflow.model.text.grammar._MAX_MASK_S", -1.0)
    with pytest.raises(InvalidRequest, match="after 0 tokens: it takes too long"):
        constraint.allowed([7], 1)
    monkeypatch.setattr("evenflow.model.text.grammar._MAX_COMPILE_S", -1.0)
    with pytest.raises(InvalidRequest, match="too long to compile"):
        grammars.check(Grammar.regex("[0-9]+"))


def test_a_model_that_cannot_end_an_answer_takes_no_grammar() -> None:
    tokenizer = load_model(tiny_llama()).tokenizer
    tokenizer.eos_token_ids = ()
    with pytest.raises(InvalidRequest, match="no token that ends"):
        Grammars(tokenizer, 512).check(Grammar.regex("a"))
