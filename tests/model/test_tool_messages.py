"""Conversations with tools through templates of each style, and through one that knows no tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ChatTemplate, ToolStyle

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content + '' }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
TOOLS_FIRST = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}%s{% endfor %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
HERMES = TOOLS_FIRST + CALLS.replace(
    "%s", '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
)
LLAMA = TOOLS_FIRST + CALLS.replace(
    "%s", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
)
MISTRAL = TOOLS_FIRST + CALLS.replace("%s", "[TOOL_CALLS][{{ c.function | tojson }}]")

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+ 2?"}]},
    {
        "role": "assistant",
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    },
    {"role": "tool", "tool_call_id": "x", "content": "3"},
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {})


@pytest.mark.parametrize(
    ("source", "style", "written"),
    [
        (HERMES, ToolStyle.HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (LLAMA, ToolStyle.LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        (MISTRAL, ToolStyle.MISTRAL, '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'),
    ],
)
def test_templates_get_tools_and_calls_as_objects(source: str, style: ToolStyle, written: str) -> None:
    chat = template(source)
    assert chat.knows_tools
    assert chat.tool_style is style
    assert chat.render(CONVERSATION, tools=[TOOL]) == f"{json.dumps(TOOL)}<user>1\n+ 2?{written}<assistant><tool>3"


def test_a_template_for_tools_decides_the_style() -> None:
    chat = ChatTemplate({"default": PLAIN, "tool_use": MISTRAL}, {})
    assert chat.knows_tools
    assert chat.tool_style is ToolStyle.MISTRAL


def test_tools_are_written_out_for_a_template_that_knows_none() -> None:
    chat = template(PLAIN)
    assert not chat.knows_tools
    assert chat.tool_style is ToolStyle.HERMES
    system, rest = chat.render(CONVERSATION, tools=[TOOL]).split("<user>", 1)
    assert system.startswith("<system>You may call functions.")
    assert json.dumps(TOOL["function"]) in system
    assert rest == (
        '1\n+ 2?<assistant><tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
        "<user><tool_response>\n3\n</tool_response><a>"
    )


def test_what_the_system_message_said_stays_before_the_tools() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    prompt = template(PLAIN).render(messages, tools=[TOOL])
    assert prompt.startswith("<system>Be brief.\n\nYou may call functions.")
    assert prompt.count("<system>") == 1
    assert template(PLAIN).render(messages) == "<system>Be brief.<user>Hi<a>"


def test_every_role_of_openais_api_reaches_the_template() -> None:
    roles = ("system", "user", "assistant", "function")
    messages = [{"role": role, "content": "x"} for role in (*roles, "developer")]
    assert template(PLAIN).render(messages) == "<system>x<user>x<assistant>x<function>x<system>x<a>"


def test_results_that_follow_each_other_are_one_turn() -> None:
    results = [{"role": "tool", "content": text} for text in ("3", "4")]
    prompt = template(PLAIN).render([*CONVERSATION[:2], *results])
    assert prompt.count("<user>") == 2
    assert prompt.endswith("<user><tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><a>")


def test_arguments_that_are_no_json_are_shown_as_they_were() -> None:
    call = {"function": {"name": "add", "arguments": "{broken"}}
    assert '"arguments": "{broken"' in template(HERMES).render([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "'image_url'.*only 'text'"),
        ({"role": "user", "content": ["Hi"]}, "'str'.*only 'text'"),
        ({"role": "user", "content": 7}, "content of type int"),
        ({"role": "robot", "content": "Hi"}, "role 'robot' but expected one of system, developer, user, assistant"),
        ({"role": ["user"], "content": "Hi"}, "role \\['user'\\] but"),
        ({"content": "Hi"}, "role None but"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}, "no function with a name"),
        ({"role": "assistant", "content": "", "tool_calls": ["add"]}, "no function with a name"),
    ],
)
def test_messages_that_cannot_be_read(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        template(PLAIN).render([message])
