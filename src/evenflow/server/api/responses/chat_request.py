"""Turns a request of OpenAI's Responses API into a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evenflow.errors import InvalidRequest
from evenflow.server.api.request_models import MAX_MESSAGES, ChatBody, ChatMessage, ServiceFields
from evenflow.server.api.responses.items import FunctionCall, FunctionCallOutput, Item, MessageItem, text_of
from evenflow.server.api.responses.request import (
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    NamedSchemaFormat,
    ResponsesBody,
)

_SYSTEM = ("system", "developer")
_SAME_FIELDS = ("model", "stream", "temperature", "top_p", "parallel_tool_calls", *ServiceFields.model_fields)


def chat_request(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The chat over these items, which are the whole conversation."""
    messages = list(_messages(body.instructions, items))
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"Got a conversation of {len(messages)} messages but at most {MAX_MESSAGES} are allowed.")
    fields = {name: getattr(body, name) for name in _SAME_FIELDS}
    fields |= {"response_format": _response_format(body), **_tool_fields(body)}
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **fields,
    )


def _messages(instructions: str | None, items: Sequence[Item]) -> Iterator[ChatMessage]:
    """Templates want one system message, at the start, and an assistant's text and calls in one message."""
    system = [] if instructions is None else [instructions]
    turn: dict[str, Any] | None = None  # the assistant's, while it may go on
    has_begun = False
    for item in items:
        if not has_begun and isinstance(item, MessageItem) and item.role in _SYSTEM:
            system.append(text_of(item.content))
            continue
        if not has_begun and system:
            yield ChatMessage(role="system", content="\n\n".join(system))
        has_begun = True
        if isinstance(item, FunctionCall):
            turn = turn or {"role": "assistant", "content": None, "tool_calls": []}
            function = {"name": item.name, "arguments": item.arguments}
            turn["tool_calls"].append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, MessageItem | FunctionCallOutput):
            if turn is not None:
                yield _assistant(turn)
            turn = None
            if isinstance(item, FunctionCallOutput):
                output = {"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id}
                yield ChatMessage.model_validate(output)
            elif item.role == "assistant":
                turn = {"role": "assistant", "content": text_of(item.content), "tool_calls": []}
            else:
                yield ChatMessage(role=item.role, content=text_of(item.content))
    if not has_begun and system:
        yield ChatMessage(role="system", content="\n\n".join(system))
    if turn is not None:
        yield _assistant(turn)


def _assistant(turn: dict[str, Any]) -> ChatMessage:
    return ChatMessage.model_validate({**turn, "tool_calls": turn["tool_calls"] or None})


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    wanted = body.text.format if body.text else None
    if isinstance(wanted, NamedSchemaFormat):
        return {"type": wanted.type, "json_schema": wanted.model_dump(by_alias=True, exclude={"type"})}
    return wanted.model_dump() if wanted else None


def _tool_fields(body: ResponsesBody) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat."""
    tools: list[FunctionTool] = body.tools or []
    choice: Any = body.tool_choice
    if isinstance(choice, ChosenFunction):
        choice = {"type": "function", "function": {"name": choice.name}}
    elif isinstance(choice, AllowedTools):
        names = {allowed.name for allowed in choice.tools}
        if unknown := names - {tool.name for tool in tools}:
            raise InvalidRequest(f"Got {min(unknown)!r} in tool_choice.tools but it is not the name of a tool.")
        tools, choice = [tool for tool in tools if tool.name in names], choice.mode
    chat_tools = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in tools]
    return {"tools": chat_tools or None, "tool_choice": choice}
