"""Turns a request of OpenAI's Responses API into a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from evenflow.errors import InvalidRequest
from evenflow.server.api.request_models import MAX_MESSAGES, ChatBody, ChatMessage, ServiceFields
from evenflow.server.api.response_format import JsonObjectFormat, JsonSchemaFormat, TextFormat
from evenflow.server.api.responses.items import FunctionCall, FunctionCallOutput, Item, MessageItem, text_of
from evenflow.server.api.responses.request import (
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    NamedSchemaFormat,
    ResponsesBody,
)
from evenflow.server.api.tools import NamedFunction, NamedToolChoice, Tool

_SYSTEM = ("system", "developer")


def chat_request(body: ResponsesBody, items: Sequence[Item]) -> ChatBody:
    """The chat over these items, which are the whole conversation."""
    messages = list(_messages(body.instructions, items))
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"Got a conversation of {len(messages)} messages but at most {MAX_MESSAGES} are allowed.")
    return ChatBody(
        messages=messages,
        model=body.model,
        stream=body.stream,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(body),
        **{name: getattr(body, name) for name in ServiceFields.model_fields},
        **_tool_fields(body),
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


def _response_format(body: ResponsesBody) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
    wanted = body.text.format if body.text else None
    if isinstance(wanted, NamedSchemaFormat):
        return JsonSchemaFormat(type="json_schema", json_schema=wanted.named_schema())
    return wanted


def _tool_fields(body: ResponsesBody) -> dict[str, Any]:
    """`tools` and `tool_choice` of a chat."""
    tools: list[FunctionTool] = body.tools or []
    choice: Any = body.tool_choice
    if isinstance(choice, ChosenFunction):
        choice = NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    elif isinstance(choice, AllowedTools):
        names = {allowed.name for allowed in choice.tools}
        if unknown := names - {tool.name for tool in tools}:
            raise InvalidRequest(f"Got {min(unknown)!r} in tool_choice.tools but it is not the name of a tool.")
        tools, choice = [tool for tool in tools if tool.name in names], choice.mode
    chat_tools = [Tool(type="function", function=tool.definition()) for tool in tools]
    return {"tools": chat_tools or None, "tool_choice": choice}
