"""Responses of the Responses API as /openapi.json describes them. The server writes without these; tests compare."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from evenflow.server.api.response_models import CachedTokens, ChatTokenLogprob
from evenflow.server.api.responses.items import Status


class _Described(BaseModel):
    model_config = ConfigDict(extra="forbid")


class WrittenText(_Described):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class WrittenMessage(_Described):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[WrittenText]


class WrittenCall(_Described):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseError(_Described):
    code: Literal["server_error"]
    message: str


class IncompleteDetails(_Described):
    reason: Literal["max_output_tokens"]


class ReasoningTokens(_Described):
    reasoning_tokens: int


class ResponseUsage(_Described):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class EchoedReasoning(_Described):
    effort: str | None
    summary: None


class ResponseObject(_Described):
    """What the model wrote, and the request's settings with their defaults."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[WrittenMessage | WrittenCall]
    usage: ResponseUsage | None
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: EchoedReasoning
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


class DeletedResponse(_Described):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(_Described):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
