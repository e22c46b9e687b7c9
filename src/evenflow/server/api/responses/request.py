"""The body of POST /v1/responses, checked field by field. Unknown fields are refused, as for chats."""

from __future__ import annotations

from typing import Annotated, Any, Literal, LiteralString

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from evenflow.server.api.request_models import FEW, MAX_INT, NumLogprobs, OnlyFalse, ServiceFields
from evenflow.server.api.response_format import JsonObjectFormat, NamedSchema, StrictModel, TextFormat, of_types
from evenflow.server.api.responses.items import LIST_TAG, TEXT_TAG, Items, text_or_list
from evenflow.server.api.tools import CLIENTS_TOOLS, MAX_TOOLS, FunctionDefinition, FunctionName
from evenflow.server.errors import UNSUPPORTED

_NO_EFFECT = "Has no effect."
_LOGPROBS = "message.output_text.logprobs"


def _refused(reason: LiteralString) -> BeforeValidator:
    """For a field of OpenAI's of which only null is accepted."""

    def check(value: object) -> object:
        if value is not None:
            raise PydanticCustomError(UNSUPPORTED, reason)
        return value

    return BeforeValidator(check)


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    type: Literal["function"]


class ChosenFunction(StrictModel):
    type: Literal["function"]
    name: FunctionName


class AllowedTools(StrictModel):
    """Offers the model only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedSchemaFormat(NamedSchema):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]


class TextSettings(StrictModel):
    format: Annotated[TextFormat | JsonObjectFormat | NamedSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description=_NO_EFFECT)


class ReasoningSettings(StrictModel):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For the model's chat template, as reasoning_effort."
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=_NO_EFFECT)
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description=_NO_EFFECT)
    context: str | None = Field(None, description=_NO_EFFECT)


class StreamSettings(StrictModel):
    include_obfuscation: bool | None = Field(None, description=_NO_EFFECT)


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]

Label = Annotated[str, Field(max_length=1024)]  # returned in several events


class ResponsesBody(StrictModel, ServiceFields):
    """POST /v1/responses"""

    input: Annotated[
        Annotated[str, Field(min_length=1), TEXT_TAG] | Annotated[Items, LIST_TAG], Discriminator(text_or_list)
    ] = Field(description="A user's message, or a conversation.")
    model: str | None = Field(None, description="A name from /v1/models; by default the first.")
    instructions: str | None = Field(None, description="A system message before the input; not carried over.")
    previous_response_id: str | None = Field(None, description="A stored response that the input continues.")
    store: bool | None = Field(None, description="True by default: keep the response for a while, in memory.")
    stream: bool | None = None
    stream_options: StreamSettings | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="By default, up to the end of the context."
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: NumLogprobs | None = Field(None, description=f"Needs {_LOGPROBS!r} in include.")
    tools: (
        Annotated[
            list[Annotated[FunctionTool, of_types("function", default="function", hint=CLIENTS_TOOLS)]],
            Field(max_length=MAX_TOOLS, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None = Field(
        None, description="By default 'auto' if there are tools: the model decides."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False allows one call. Required calls are several only if this is true."
    )
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: Annotated[list[Included], FEW] | None = Field(
        None, description=f"{_LOGPROBS!r} returns logprobs; others have no effect."
    )
    metadata: Metadata | None = Field(None, description="Returned as it is.")
    truncation: Literal["disabled"] | None = Field(None, description="A conversation over the context is refused.")
    max_tool_calls: int | None = Field(
        None, ge=1, le=MAX_INT, description="Has no effect: it limits tools that the server runs."
    )
    background: OnlyFalse | None = None
    user: Label | None = Field(None, description=_NO_EFFECT)
    safety_identifier: Label | None = Field(None, description=_NO_EFFECT)
    prompt_cache_key: Label | None = Field(None, description="Has no effect: see tenant.")
    prompt_cache_retention: Label | None = Field(None, description=_NO_EFFECT)
    client_metadata: dict[str, Any] | None = Field(None, description=_NO_EFFECT)
    conversation: Annotated[None, _refused("conversations are not stored; use previous_response_id")] = None
    prompt: Annotated[None, _refused("prompts are not stored; send instructions and input")] = None
    context_management: Annotated[None, _refused("conversations are not compacted; shorten the input")] = None
    moderation: Annotated[None, _refused("nothing is moderated; leave it out")] = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ResponsesBody:
        if self.top_logprobs and not self.wants_logprobs:
            raise ValueError(f"top_logprobs is allowed only with include=[{_LOGPROBS!r}]")
        if self.wants_logprobs and self.tools and self.tool_choice != "none":
            raise ValueError(f"{_LOGPROBS!r} in include is allowed with tools only if tool_choice is 'none'")
        return self

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    @property
    def is_stored(self) -> bool:
        return self.store is not False
