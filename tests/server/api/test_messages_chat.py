"""A request of Anthropic's API as the chat that it becomes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from evenflow.errors import InvalidRequest
from evenflow.server.api.messages.chat_request import as_chat
from evenflow.server.api.messages.request import CountTokensBody, MessagesBody
from evenflow.server.api.request_models import ChatBody
from tests.clients import agent_trace

USER = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "description": "Looks", "input_schema": {"type": "object"}, "strict": True}


def chat_of(messages: list[Any] = USER, **fields: Any) -> ChatBody:
    body = {"model": "m", "max_tokens": 5, "messages": messages, **fields}
    return as_chat(MessagesBody.model_validate_json(json.dumps(body)))


def plain(chat: ChatBody) -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_a_coding_agents_turn_becomes_a_chat() -> None:
    chat = as_chat(MessagesBody.model_validate_json(json.dumps(agent_trace.request("m", 5))))
    system, question, calls, first, second, edit, third, go_on = plain(chat)
    assert system["content"].startswith("You are a coding agent.\n\n# Rules\n0. Read")
    assert question["content"].endswith("</system-reminder>\n\nMend the test that fails.")
    assert calls["content"] == "I read the two files first."
    assert [call["function"]["arguments"] for call in calls["tool_calls"]] == [
        {"file_path": "/src/1.py"},
        {"file_path": "/src/2.py"},
    ]
    assert first["content"].startswith("1\tdef add")
    assert [(one["role"], one["name"], one["tool_call_id"]) for one in (first, second, third)] == [
        ("tool", "Read", calls["tool_calls"][0]["id"]),
        ("tool", "Read", calls["tool_calls"][1]["id"]),
        ("tool", "Edit", edit["tool_calls"][0]["id"]),
    ]
    assert go_on == {"role": "user", "content": "Go on."}
    assert len(chat.tools or ()) == 15
    assert chat.chat_template_kwargs == {"enable_thinking": True}


def test_prompts_of_an_agent_share_a_prefix() -> None:
    """A coding agent's first block is another one in each request; with it, the prefix cache would never help."""
    one, two = (
        as_chat(MessagesBody.model_validate(agent_trace.request("m", 1, billing))) for billing in ("a1b2", "c3d4")
    )
    assert plain(one) == plain(two)


def test_adjacent_turns_of_one_role_are_one() -> None:
    chat = chat_of(
        [
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "two"}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
            {"role": "user", "content": "three"},
        ]
    )
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    assert plain(chat) == [
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "a", "name": "look"},
        {"role": "user", "content": "three"},
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any", "disable_parallel_tool_use": False}, "required", None),
        ({"type": "none"}, "none", None),
    ],
)
def test_choices_of_tools(choice: Any, expected: str | None, parallel: bool | None) -> None:
    chat = chat_of(tools=[TOOL], tool_choice=choice)
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)


def test_a_tool_is_chosen_by_its_name() -> None:
    chat = chat_of(tools=[TOOL], tool_choice={"type": "tool", "name": "look"})
    assert chat.model_dump()["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert chat.model_dump()["tools"][0]["function"] == {
        "name": "look",
        "description": "Looks",
        "parameters": {"type": "object"},
        "strict": True,
    }


def test_sampling_and_formats() -> None:
    chat = chat_of(
        stop_sequences=["a", "b"],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stream=True,
        tenant="docs",
        tbt_target="50ms",
        thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )
    sampling = chat.sampling(max_tokens=5, index=0, grammar=None)
    assert sampling.stop == ("a", "b")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.tbt_seconds) == (0.5, 0.9, 7, 0.05)
    assert (chat.streaming is not None, chat.tenant) == (True, "docs")
    assert chat.template_variables == {"enable_thinking": False, "reasoning_effort": "low"}
    assert chat.grammar is not None
    assert chat.grammar.kind == "json_schema"


def test_a_result_without_its_call_is_refused() -> None:
    body = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "b"}]}]
    with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]: got a tool_result for 'b' but no tool_use"):
        chat_of(body)


def test_the_assistants_last_message_is_continued() -> None:
    body = {"model": "m", "messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}
    chat = as_chat(CountTokensBody.model_validate(body))
    assert plain(chat) == [{"role": "assistant", "content": "", "reasoning_content": "x"}]
    assert chat.continue_final_message
    assert not chat_of([{"role": "user", "content": "a"}]).continue_final_message


def test_thoughts_before_a_call_go_to_the_template() -> None:
    """A template renders them while the answer is not complete; before, they were dropped."""
    thoughts = [{"type": "thinking", "thinking": text, "signature": "s"} for text in ("First this.", "Then that.")]
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    chat = chat_of(
        [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": thoughts[:1]},
            {"role": "assistant", "content": [thoughts[1], call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]},
        ]
    )
    assistant = plain(chat)[1]
    assert assistant["reasoning_content"] == "First this.\n\nThen that."
    assert assistant["tool_calls"][0]["id"] == "a"
