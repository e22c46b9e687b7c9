"""Responses as /openapi.json describes them. The server writes its responses without these classes; tests compare."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Response(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CachedTokens(_Response):
    cached_tokens: int


class Usage(_Response):
    """Tokens read and generated. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class PromptToken(_Response):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]


class CompletionLogprobs(_Response):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Response):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(_Response):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(_Response):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Response):
    content: list[ChatTokenLogprob]
    refusal: None


class CalledFunction(_Response):
    name: str
    arguments: str


class ToolCall(_Response):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Response):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(_Response):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | None = None


class ChatCompletion(_Response):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ModelCard(_Response):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None  # None: it has not been loaded yet


class ModelList(_Response):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(_Response):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class PlainText(_Response):
    prompt: str


class Embedding(_Response):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(_Response):
    prompt_tokens: int
    total_tokens: int


class Embeddings(_Response):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class CurrentTarget(_Response):
    policy: str
    tbt_target: float | None
    paced: bool
    feasible_target: float | None  # the lowest feasible one, while this one is not


class PromptChunk(_Response):
    """A part of a prompt that was computed in one step."""

    start: int  # its first token's position in the prompt
    length: int
    reason: str  # why it is not longer
    seconds: float  # its share of the step's time
    end_s: float  # when the step ended, after the request arrived


class GapCause(_Response):
    kind: str
    seconds: float
    tokens: int  # of the prompt's chunk that caused it; else 0


class LateGap(_Response):
    """A gap before a token that came too late."""

    at_s: float  # when it came
    gap_s: float
    late_s: float  # how much too late
    causes: list[GapCause]  # largest first; they add up to the gap


class PrefilledRequest(_Response):
    """Times are seconds since the request arrived; null: not yet."""

    id: str
    prompt_tokens: int
    cached_tokens: int
    queue_s: float | None  # when its first step began
    ttft_s: float | None
    chunks: list[PromptChunk]
    late: list[LateGap]  # the longest, in the order of time
    output_tokens: int | None
    finish_reason: str | None
    end_s: float | None


class RequestChunks(_Response):
    """The requests of one response: one per choice."""

    id: str
    object: Literal["request.chunks"]
    requests: list[PrefilledRequest]


class Status(_Response):
    status: str


class Version(_Response):
    version: str


class ErrorDetail(_Response):
    message: str
    type: str
    param: str | None
    code: str | None
    # Of requests that would be late, or were.
    expected_ttft_s: float | None = None
    ttft_target_s: float | None = None
    deadline_s: float | None = None


class ErrorBody(_Response):
    """The body of every response with status 400 or higher."""

    error: ErrorDetail
