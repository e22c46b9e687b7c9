"""The bodies of responses of the Messages API, for /openapi.json."""

from __future__ import annotations

from typing import Any, Literal

from evenflow.server.api.response_format import StrictModel


class TextContent(StrictModel):
    type: Literal["text"]
    text: str


class ToolUseContent(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(StrictModel):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(StrictModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ToolUseContent]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class InputTokens(StrictModel):
    input_tokens: int


class MessageErrorCause(StrictModel):
    error_code: str


class MessageErrorDetail(StrictModel):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "overloaded_error",
        "api_error",
    ]
    message: str
    details: MessageErrorCause | None = None


class MessageErrorBody(StrictModel):
    """The body of every response with status 400 or higher under /v1/messages."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str
