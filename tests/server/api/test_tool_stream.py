"""Calls found in text: what is one and what is not, and that how the text was cut does not matter."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenflow.model.text.chat_template import ToolStyle
from evenflow.server.api.tool_stream import ToolStream, whole_message

HERMES, LLAMA, MISTRAL = ToolStyle.HERMES, ToolStyle.LLAMA, ToolStyle.MISTRAL
CALL = '{"name": "f", "arguments": {"a": [1, {"b": "}]\\"{"}]}}'
ARGUMENTS = '{"a": [1, {"b": "}]\\"{"}]}'

Parsed = tuple[str, list[tuple[str, str]]]


def deltas_of(style: ToolStyle, pieces: list[str], parallel: bool = True) -> list[dict[str, Any]]:
    stream = ToolStream(style, {"f", "g"}, parallel=parallel)
    return [*(stream.push(piece) for piece in pieces), stream.push("", is_last=True)]


def parsed(deltas: list[dict[str, Any]]) -> Parsed:
    """The content and the calls, put together as a client does."""
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append((call["function"]["name"], ""))
        name, arguments = calls[call["index"]]
        calls[call["index"]] = name, arguments + call["function"]["arguments"]
    return "".join(delta.get("content", "") for delta in deltas), calls


def parsed_whole(style: ToolStyle, text: str) -> Parsed:
    message = whole_message(ToolStream(style, {"f", "g"}).push(text, is_last=True))
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return message["content"] or "", [(function["name"], function["arguments"]) for function in calls]


CASES: list[tuple[ToolStyle, str, str, list[tuple[str, str]]]] = [
    (HERMES, "Plain <b>text</b> \n", "Plain <b>text</b> \n", []),
    (HERMES, "", "", []),
    (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
    (HERMES, f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.", [("f", ARGUMENTS)]),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "h"}</tool_call>\n',
        "",
        [("f", "{}"), ("h", "{}")],
    ),
    (HERMES, '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"id": 7, "name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, f"<tool_call>{CALL}</tool_call>\n\nDone.", "Done.", [("f", ARGUMENTS)]),
    (HERMES, f"<<tool_call>{CALL}", "<", [("f", ARGUMENTS)]),
    (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    (HERMES, '<tool_call>{"city": "Rome"}</tool_call>', '<tool_call>{"city": "Rome"}</tool_call>', []),
    (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (HERMES, "a <tool_call", "a <tool_call", []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', "", [("f", '{"a": ')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {} oops', "oops", [("f", "{}")]),
    (HERMES, CALL, "", [("f", ARGUMENTS)]),  # the mark forgotten
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA, '<|python_tag|>{"name": "h", "parameters": {}}', "", [("h", "{}")]),
    (LLAMA, '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    (LLAMA, '{"name": "Bob", "age": 7}', '{"name": "Bob", "age": 7}', []),
    (LLAMA, '{"name": "f", "age": 7}', '{"name": "f", "age": 7}', []),
    (LLAMA, f"As in {CALL}", f"As in {CALL}", []),
    (LLAMA, f'{CALL} {{"x": 1}}', '{"x": 1}', [("f", ARGUMENTS)]),
    (MISTRAL, f'[TOOL_CALLS] [{CALL}, {{"name": "h", "arguments": {{}}}}]', "", [("f", ARGUMENTS), ("h", "{}")]),
    (MISTRAL, f"[{CALL}]", "", [("f", ARGUMENTS)]),  # special tokens are no text
    (MISTRAL, "[1, 2] and [TOOL", "[1, 2] and [TOOL", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
def test_calls_and_content(style: ToolStyle, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(deltas_of(style, [text])) == parsed_whole(style, text) == (content, calls)


PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CALL, '{"name": "f"', '"arguments": ', "{",
        "}", "[", "]", ", ", ": ", '"', "\\", "\n", " ", "text", '{"name": "g", "parameters": {"x": "y"}}', "null", ";",
        "<",
    ]
)  # fmt: skip


@settings(max_examples=300)
@given(
    style=st.sampled_from(ToolStyle),
    text=st.one_of(st.lists(PIECES, max_size=12).map("".join), st.sampled_from([text for _, text, _, _ in CASES])),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    parallel=st.booleans(),
)
def test_how_the_text_was_cut_does_not_matter(style: ToolStyle, text: str, cuts: list[int], parallel: bool) -> None:
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(ends)]
    assert parsed(deltas_of(style, pieces, parallel)) == parsed(deltas_of(style, [text], parallel))
    assert parsed(deltas_of(style, list(text), parallel)) == parsed(deltas_of(style, [text], parallel))


@given(style=st.sampled_from(ToolStyle), text=st.text(st.sampled_from('ab<>{}[]"/_tolc \n\\:')))
def test_text_without_calls_comes_out_whole(style: ToolStyle, text: str) -> None:
    assert parsed(deltas_of(style, [text])) == (text, [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(
    style=st.sampled_from(ToolStyle),
    calls=st.lists(
        st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(max_size=5), JSON, max_size=3)), min_size=1, max_size=3
    ),
)
def test_what_a_model_writes_is_what_a_client_gets(style: ToolStyle, calls: list[tuple[str, dict[str, Any]]]) -> None:
    key = "parameters" if style is LLAMA else "arguments"
    written = [json.dumps({"name": name, key: arguments}) for name, arguments in calls]
    text = {
        HERMES: "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in written),
        LLAMA: "; ".join(written),
        MISTRAL: f"[TOOL_CALLS][{', '.join(written)}]",
    }[style]
    content, found = parsed(deltas_of(style, list(text)))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_nothing_is_held_longer_than_it_must() -> None:
    stream = ToolStream(HERMES, {"f"})
    assert stream.push("Hello") == {"content": "Hello"}
    assert stream.push(" ") == {}
    assert stream.push("<b>") == {"content": " <b>"}
    assert stream.push("<tool_") == {}
    assert stream.push('call>{"name": "f", "arguments": ') == {}
    [start] = stream.push('{"a"').pop("tool_calls")
    assert (start["index"], start["function"]) == (0, {"name": "f", "arguments": '{"a"'})
    assert stream.push(": 1") == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1"}}]}
    assert stream.push("}}</tool_call>") == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert stream.push("", is_last=True) == {}
    assert stream.num_calls == 1


def test_deltas_in_order_keep_content_and_calls_apart() -> None:
    text = (
        'First. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nThen <tool_call>{"name": "g"}</tool_call>'
    )
    stream = ToolStream(ToolStyle.HERMES, {"f", "g"})
    deltas = stream.push_in_order(text + " Last.", is_last=True)
    contents = [delta.get("content") for delta in deltas]
    assert contents == ["First.", None, "Then", None, "Last."]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": "{}"}]


def test_deltas_have_the_shape_of_openais() -> None:
    stream = ToolStream(MISTRAL, {"f"})
    assert stream.push("Well.") == {"content": "Well."}
    [call] = stream.push('[TOOL_CALLS][{"name": "f", "arguments": {"a"')["tool_calls"]
    assert call.pop("id").isalnum()
    assert call == {"index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    assert stream.push(": 1}}]") == {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}
    assert stream.push("", is_last=True) == {}


def test_ids_differ_and_fit_the_models_template() -> None:
    two = '[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]'
    for style, length in ((HERMES, 29), (MISTRAL, 9)):
        ids = [call["id"] for call in deltas_of(style, [two])[0]["tool_calls"]]
        assert len(set(ids)) == 2
        assert {len(call_id) for call_id in ids} == {length}


def test_only_the_first_call_where_one_was_asked_for() -> None:
    two = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert parsed(deltas_of(HERMES, [two], parallel=False)) == ("", [("f", ARGUMENTS)])
