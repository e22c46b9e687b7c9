"""Which input a record holds."""

from __future__ import annotations

from typing import Any

import pytest

from evenflow.workload.inputs import (
    PROMPT_FIELDS,
    ChatInput,
    Input,
    TextInput,
    TraceRequest,
    UnusableRecordError,
    input_of,
)


@pytest.mark.parametrize(
    "field", [name for name in PROMPT_FIELDS if name not in ("messages", "conversations", "conversation")]
)
def test_a_prompt_is_found_under_each_usual_name(field: str) -> None:
    assert input_of({"id": 7, field: "Hello"}, None) == TextInput("Hello")


def test_the_first_usual_name_counts() -> None:
    assert input_of({"question": "Why?", "prompt": "Answer: Why?"}, None) == TextInput("Answer: Why?")
    assert input_of({"prompt": None, "question": "Why?"}, None) == TextInput("Why?")


@pytest.mark.parametrize(
    ("record", "field", "expected"),
    [
        ({"body": {"input": "deep"}}, "body.input", TextInput("deep")),
        ({"prompt": "no", "article": "yes"}, "article", TextInput("yes")),
        ("a bare text", None, TextInput("a bare text")),
        ({"prompt": [1, 2, 3]}, None, TraceRequest(3)),
    ],
)
def test_where_it_may_lie_too(record: Any, field: str | None, expected: Input) -> None:
    assert input_of(record, field) == expected


def test_a_conversation_is_its_texts() -> None:
    record = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "What is this?"}]},
            {"from": "gpt", "value": "A cat."},
            {"from": "human", "value": "Sure?"},
            {"role": "assistant", "content": None},
        ]
    }
    found = input_of(record, None)
    assert isinstance(found, ChatInput)
    assert [message["role"] for message in found.messages] == ["system", "user", "assistant", "user"]
    assert found.text == "Be brief.\nWhat is this?\nA cat.\nSure?"


SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]


@pytest.mark.parametrize(
    ("record", "text", "fields"),
    [
        # SQuAD, Alpaca as published (its text has the answer too), Alpaca without an input, Dolly, OpenOrca, BoolQ.
        ({"context": "Bo ate.", "question": "Who?", "answers": {}}, "Bo ate.\n\nWho?", ("context", "question")),
        (
            {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Add. 1 2 3"},
            "Add.\n\n1 2",
            ("instruction", "input"),
        ),
        ({"instruction": "Sing.", "input": "", "output": "La"}, "Sing.", ("instruction",)),
        (
            {"instruction": "Who?", "context": "Bo ate.", "response": "Bo"},
            "Who?\n\nBo ate.",
            ("instruction", "context"),
        ),
        ({"system_prompt": "Be brief.", "question": "Why?"}, "Be brief.\n\nWhy?", ("system_prompt", "question")),
        (
            {"passage": "It rains.", "question": "Does it?", "answer": True},
            "It rains.\n\nDoes it?",
            ("passage", "question"),
        ),
        ({"conversations": SHAREGPT, "id": "1"}, "Hi", ("conversations",)),
        ({"system": "Be brief.", "conversations": SHAREGPT}, "Be brief.\nHi", ("system", "conversations")),
        ({"messages": [{"role": "user", "content": "Hi"}], "text": "Hi there"}, "Hi", ("messages",)),
        ({"prompt": "All of it", "context": "It", "messages": []}, "All of it", ("prompt",)),
        ({"context": {"title": ["a"]}, "question": "Who?"}, "Who?", ("question",)),
    ],
)
def test_all_prompt_fields_of_common_shapes_are_used(record: Any, text: str, fields: tuple[str, ...]) -> None:
    found = input_of(record, None)
    assert not isinstance(found, TraceRequest)
    assert (found.text, found.fields) == (text, fields)


def test_azure_names_its_columns_so() -> None:
    row = {"TIMESTAMP": "2023-11-16 18:17:03.9799600", "ContextTokens": "4808", "GeneratedTokens": "10"}
    next_row = row | {"TIMESTAMP": "2023-11-16 18:17:04.0319600"}
    first, second = input_of(row, None), input_of(next_row, None)
    assert isinstance(first, TraceRequest)
    assert isinstance(second, TraceRequest)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (4808, 10)
    assert first.arrival_s is not None
    assert second.arrival_s is not None
    assert second.arrival_s - first.arrival_s == pytest.approx(0.052)


def test_mooncake_counts_milliseconds_and_blocks() -> None:
    record = {"timestamp": 3052, "input_length": 2290, "output_length": 316, "hash_ids": [0, 42, 43, 44, 45]}
    assert input_of(record, None) == TraceRequest(2290, 316, 3.052, (0, 42, 43, 44, 45))


def test_a_trace_without_more_than_counts_will_do() -> None:
    assert input_of({"prompt_tokens": 12, "arrival_s": 1.5}, None) == TraceRequest(12, None, 1.5)
    assert input_of({"input_tokens": 12, "timestamp": float("nan")}, None) == TraceRequest(12)


@pytest.mark.parametrize(
    ("record", "field", "what"),
    [
        ({}, None, "no field such as prompt"),
        ({"prompt": ""}, None, "an empty prompt"),
        ({"prompt": 3}, None, "neither a text"),
        ({"prompt": []}, None, "neither a text"),
        ({"prompt": "text"}, "article", "no field article"),
        ({"prompt": "text"}, "prompt.text", "no field prompt.text"),
        ([1, 2], None, "not an object"),
        (None, None, "not an object"),
        ({"ContextTokens": "many"}, None, "not a number"),
        ({"ContextTokens": "-3"}, None, "under 1"),
        ({"input_length": float("inf")}, None, "not a number"),
    ],
)
def test_what_cannot_be_used_says_why(record: Any, field: str | None, what: str) -> None:
    with pytest.raises(UnusableRecordError, match=what):
        input_of(record, field)
