"""Items of a conversation as OpenAI's Responses API writes them: what a request's `input` may hold.

Output items of earlier responses are valid input, so fields that only the server sets are accepted and ignored.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from evenflow.server.api.request_models import FEW, MAX_MESSAGES
from evenflow.server.api.response_format import StrictModel, of_types

Status = Literal["in_progress", "completed", "incomplete"]
_SET_BY_SERVER = "Has no effect: the server sets it."
_NO_EFFECT = "Has no effect."
TEXT_TAG, LIST_TAG = Tag("<text>"), Tag("<list>")  # brackets keep tags out of the paths in error messages


def text_or_list(value: object) -> str:
    """Errors are then about the one that was meant."""
    return LIST_TAG.tag if isinstance(value, list) else TEXT_TAG.tag


class InputText(StrictModel):
    type: Literal["input_text"]
    text: str


class OutputText(StrictModel):
    """What the model wrote before."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any] | None = Field(None, description=_SET_BY_SERVER)
    logprobs: list[Any] | None = Field(None, description=_SET_BY_SERVER)


def _tag(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind or 'message'}>"


ContentPart = Annotated[
    Annotated[InputText, Tag("<input_text>")] | Annotated[OutputText, Tag("<output_text>")],
    Discriminator(_tag),
    of_types("input_text", "output_text", hint="; this server reads only text"),
]
Content = Annotated[Annotated[str, TEXT_TAG] | Annotated[list[ContentPart], FEW, LIST_TAG], Discriminator(text_or_list)]


class MessageItem(StrictModel):
    """A turn of the conversation."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = Field(None, description=_SET_BY_SERVER)
    status: Status | None = Field(None, description=_SET_BY_SERVER)
    phase: str | None = Field(None, description=_NO_EFFECT)


class FunctionCall(StrictModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    id: str | None = Field(None, description=_SET_BY_SERVER)
    status: Status | None = Field(None, description=_SET_BY_SERVER)
    namespace: None = None


class FunctionCallOutput(StrictModel):
    """What the called function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: Content
    id: str | None = Field(None, description=_SET_BY_SERVER)
    status: Status | None = Field(None, description=_SET_BY_SERVER)
    name: str | None = Field(None, description=_NO_EFFECT)
    namespace: None = None


class ReasoningItem(StrictModel):
    """What a model thought, as other servers return it. Left out of the prompt."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[Any], FEW] | None = None
    content: Annotated[list[Any], FEW] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(_tag),
    of_types(
        *("message", "function_call", "function_call_output", "reasoning"),
        hint="; send whole items, not references, or use previous_response_id",
        default="message",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}

read_items = TypeAdapter(list[Item]).validate_json


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def as_stored(item: Item) -> dict[str, Any]:
    """The item as it is kept and listed: with an id, and content in parts."""
    fields = item.model_dump(exclude_none=True, exclude={"content": {"__all__": {"annotations", "logprobs"}}})
    kind = item.type or "message"
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        part = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": part, "text": item.content}]
    return {"id": f"{_ID_PREFIXES[kind]}_{secrets.token_hex(12)}", "status": "completed", **fields, "type": kind}
