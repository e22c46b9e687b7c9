"""Conversations with tools, in the form that chat templates take, or as plain text for templates without tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, get_args

from evenflow.errors import InvalidRequest

Message = Mapping[str, Any]
Role = Literal["system", "developer", "user", "assistant", "tool", "function"]  # of OpenAI's API
_ROLES: tuple[str, ...] = get_args(Role)

_TOOLS_ARE = """You may call functions. These are the functions, one a line, with the JSON schema of their parameters:
{functions}

To call a function, answer with its name and its arguments as JSON, between these two marks:
<tool_call>
{{"name": "name of the function", "arguments": {{"name of a parameter": "its value"}}}}
</tool_call>
Its result comes back between <tool_response> and </tool_response>."""


def plain_message(message: Message) -> dict[str, Any]:
    """Content as one text; the arguments of calls as objects, which templates write in their own way."""
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequest(f"Got a message with role {role!r} but expected one of {', '.join(_ROLES)}.")
    # Templates know OpenAI's newer role by its older name.
    plain = {**message, "role": "system" if role == "developer" else role, "content": _joined(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
    else:
        plain.pop("tool_calls", None)
    return plain


def _joined(content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"Got content of type {type(content).__name__} but expected text or a list of parts.")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"Got a content part of type {kind!r} but this model reads only 'text'.")
    return "\n".join(part["text"] for part in content)  # as vLLM and llama.cpp do: words of two parts stay apart


def _with_object(call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest("Got a tool call in a message but no function with a name in it.")
    assert isinstance(call, Mapping)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # a model that wrote invalid JSON sees it again unchanged
            arguments = json.loads(arguments or "{}")
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def write_out_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The messages without tools: the system message describes them, calls and results are text."""
    written: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if written and written[-1].get("is_result"):
                written[-1]["content"] += "\n" + result
            else:
                written.append({"role": "user", "content": result, "is_result": True})
            continue
        calls = [_written_call(call["function"]) for call in message.get("tool_calls", ())]
        content = "\n".join(filter(None, [message["content"], *calls]))
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        written.append({**others, "content": content})
    if tools:
        _describe(written, tools)
    return [{name: value for name, value in message.items() if name != "is_result"} for message in written]


def _describe(written: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    described = _TOOLS_ARE.format(functions=functions)
    if written and written[0].get("role") == "system":
        written[0]["content"] = f"{written[0]['content']}\n\n{described}"
    else:
        written.insert(0, {"role": "system", "content": described})


def _written_call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
