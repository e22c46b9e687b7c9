"""The bodies of Anthropic's Messages API, checked field by field. `chat_request` turns them into chats.

As in OpenAI's API here, unknown fields are refused, and fields that change nothing say so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from evenflow.server.api.request_models import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_STOPS,
    ServiceFields,
    StopText,
)
from evenflow.server.api.response_format import StrictModel, of_types
from evenflow.server.api.tools import CLIENTS_TOOLS, MAX_TOOLS, FunctionName

MAX_BLOCKS = 1024  # of one message

_NO_EFFECT = "Has no effect."


class CacheControl(StrictModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Cacheable(StrictModel):
    cache_control: CacheControl | None = Field(None, description="Has no effect: every prefix is cached.")


class TextBlock(_Cacheable):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, description=_NO_EFFECT)


class ToolUseBlock(_Cacheable):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]
    caller: dict[str, Any] | None = Field(None, description=_NO_EFFECT)


class ThinkingBlock(StrictModel):
    """Left out of the prompt, as thoughts of earlier turns are."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(StrictModel):
    """Left out of the prompt: nobody here can read it."""

    type: Literal["redacted_thinking"]
    data: str


_READS_TEXT = "; this server reads only text"
PlainBlock = Annotated[TextBlock, of_types("text", hint=_READS_TEXT)]
PlainBlocks = Annotated[list[PlainBlock], Field(max_length=MAX_BLOCKS, fail_fast=True)]


class ToolResultBlock(_Cacheable):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: str | PlainBlocks | None = None
    is_error: bool | None = Field(None, description="Has no effect: the model reads the content.")


Block = Annotated[
    Annotated[
        TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
        Field(discriminator="type"),
    ],
    of_types("text", "tool_use", "tool_result", "thinking", "redacted_thinking", hint=_READS_TEXT),
]

_OF_ONE_ROLE = {
    "tool_use": "assistant",
    "tool_result": "user",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}


class InputMessage(StrictModel):
    """One turn. Adjacent turns of one role are read as one."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True)]

    @model_validator(mode="after")
    def _check_roles(self) -> InputMessage:
        for block in self.content if isinstance(self.content, list) else ():
            role = _OF_ONE_ROLE.get(block.type, self.role)
            if role != self.role:
                raise ValueError(f"got a {block.type} block in a message of the {self.role}; only the {role} has them")
        return self


class MessagesTool(_Cacheable):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="A JSON schema.")
    strict: bool | None = Field(None, description="Has no effect: required calls always match the schema.")
    input_examples: list[dict[str, Any]] | None = Field(None, description=_NO_EFFECT)
    eager_input_streaming: bool | None = Field(None, description="Has no effect: input is always streamed as it comes.")
    defer_loading: bool | None = Field(None, description="Has no effect: the model sees every tool.")
    allowed_callers: list[str] | None = Field(None, description=_NO_EFFECT)


class MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="Of the tool to call, with type 'tool'.")
    disable_parallel_tool_use: bool | None = Field(None, description="True allows one call.")

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("expected a name with type 'tool', and with no other")
        return self


class Thinking(StrictModel):
    """Sets `enable_thinking` for chat templates that have it."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=0, le=MAX_INT, description="Has no effect: max_tokens is the limit.")
    display: Literal["summarized", "omitted"] | None = Field(None, description=_NO_EFFECT)


class JsonFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the model's chat template, as reasoning_effort."
    )
    format: JsonFormat | None = Field(None, description="The text of the response matches this schema.")


class Metadata(StrictModel):
    user_id: str | None = Field(None, description="Has no effect: see tenant.")


class CountTokensBody(StrictModel):
    """POST /v1/messages/count_tokens"""

    model: str = Field(description="A name from /v1/models.")
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | PlainBlocks | None = None
    tools: (
        Annotated[
            list[Annotated[MessagesTool, of_types("custom", default="custom", hint=CLIENTS_TOOLS)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: MessagesToolChoice | None = Field(None, description="By default 'auto' if there are tools.")
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = Field(None, description="Has no effect: every prefix is cached.")
    context_management: dict[str, Any] | None = Field(None, description="Has no effect: the prompt is kept whole.")
    speed: Literal["standard", "fast"] | None = Field(None, description=_NO_EFFECT)

    @model_validator(mode="after")
    def _check_tools(self) -> CountTokensBody:
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not self.tools:
            raise ValueError(f"got tool_choice of type {self.tool_choice.type!r} but no tools")
        return self


class MessagesBody(CountTokensBody, ServiceFields):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=MAX_INT, description="An upper bound; the output also ends with the context.")
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="0 keeps all tokens.")
    stream: bool | None = None
    metadata: Metadata | None = None
    inference_geo: str | None = Field(None, description=_NO_EFFECT)
    diagnostics: dict[str, Any] | None = Field(None, description=_NO_EFFECT)
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Must be empty.")
    container: None = None


MESSAGES_BODIES = (MessagesBody, CountTokensBody)
