"""Turns a request of Anthropic's Messages API into a chat, which is then handled like any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from evenflow.errors import InvalidRequest
from evenflow.server.api.messages.request import (
    CountTokensBody,
    InputMessage,
    MessagesBody,
    MessagesTool,
    MessagesToolChoice,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from evenflow.server.api.request_models import ChatBody, ChatMessage, ServiceFields

# Coding agents put a line with a new hash before their system prompt: no prompt would ever share a prefix with another.
_BILLING_LINE = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_SAME_FIELDS = ("temperature", "top_p", "top_k", "stream", *ServiceFields.model_fields)


def as_chat(body: CountTokensBody) -> ChatBody:
    """The chat that a body asks for."""
    messages = list(_merged(_messages(body)))
    fields: dict[str, Any] = {"model": body.model, "messages": messages}
    if messages[-1].role == "assistant":
        fields["continue_final_message"] = True
    if body.tools:
        fields["tools"] = [_tool(tool) for tool in body.tools]
        fields |= _choice(body.tool_choice)
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if (output := body.output_config) is not None:
        fields["reasoning_effort"] = output.effort
        fields["guided_json"] = None if output.format is None else output.format.schema_
    if isinstance(body, MessagesBody):
        fields |= {name: getattr(body, name) for name in _SAME_FIELDS}
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    return ChatBody(**fields)


def _choice(choice: MessagesToolChoice | None) -> dict[str, Any]:
    if choice is None:
        return {}
    fields: dict[str, Any] = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    named = {"type": "function", "function": {"name": choice.name}}
    return {**fields, "tool_choice": _CHOICES[choice.type] if choice.name is None else named}


def _tool(tool: MessagesTool) -> dict[str, Any]:
    function = tool.model_dump(include={"name", "description", "strict"}) | {"parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _messages(body: CountTokensBody) -> Iterator[ChatMessage]:
    if isinstance(body.system, str):
        yield ChatMessage(role="system", content=body.system)
    elif kept := [block for block in body.system or () if not block.text.startswith(_BILLING_LINE)]:
        yield ChatMessage(role="system", content=_text(kept))
    called: dict[str, str] = {}  # names of tools by the ids of their calls
    for number, message in enumerate(body.messages):
        yield from _turn(number, message, called)


def _turn(number: int, message: InputMessage, called: dict[str, str]) -> Iterator[ChatMessage]:
    """One message for the texts and calls of a turn, and one for each result, in their order."""
    if isinstance(message.content, str):
        yield ChatMessage(role=message.role, content=message.content)
        return
    texts: list[TextBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for place, block in enumerate(message.content):
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            called[block.id] = block.name
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, ToolResultBlock):
            if block.tool_use_id not in called:
                where = f"messages[{number}].content[{place}]"
                raise InvalidRequest(
                    f"{where}: got a tool_result for {block.tool_use_id!r} but no tool_use before it has this id."
                )
            if texts:
                yield ChatMessage(role=message.role, content=_text(texts))
                texts = []
            yield _result(block, called[block.tool_use_id])
    if texts or calls or not any(isinstance(block, ToolResultBlock) for block in message.content):
        yield _message(message.role, _text(texts), calls, thoughts)


def _message(role: str, text: str, calls: Sequence[dict[str, Any]], thoughts: Sequence[str]) -> ChatMessage:
    """Thoughts go by the name that chat templates have for them; one that has none leaves them out."""
    thought = {"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}
    return ChatMessage.model_validate({"role": role, "content": text, "tool_calls": list(calls) or None, **thought})


def _result(block: ToolResultBlock, name: str) -> ChatMessage:
    content = block.content if isinstance(block.content, str) else _text(block.content or ())
    return ChatMessage.model_validate(
        {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, "name": name}
    )


def _text(blocks: Sequence[TextBlock]) -> str:
    """Blocks are paragraphs."""
    return "\n\n".join(block.text for block in blocks)


def _merged(messages: Iterable[ChatMessage]) -> Iterator[ChatMessage]:
    """With adjacent turns of the user, or of the assistant, as one: many chat templates want them to alternate."""
    for role, turns in groupby(messages, key=lambda message: message.role):
        if role not in ("user", "assistant"):
            yield from turns
            continue
        adjacent = list(turns)
        content = "\n\n".join(text for turn in adjacent for text in turn.texts() if text)
        calls = [call for turn in adjacent for call in turn.tool_calls or ()]
        thoughts = [thought for turn in adjacent if (thought := (turn.model_extra or {}).get("reasoning_content"))]
        yield _message(role, content, calls, thoughts)
