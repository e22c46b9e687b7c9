"""What may be sent: the bodies of requests, checked field by field.

A field that is not listed here is refused, as OpenAI's API does: nothing is ignored in silence. Those that OpenAI or
vLLM know and that change nothing here are listed as such. Must not know: engines, HTTP.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from evenflow.core.grammar import Grammar
from evenflow.core.policies import MAX_TARGET_S
from evenflow.core.request import SamplingParams
from evenflow.duration import DURATION_PATTERN, parse_duration
from evenflow.server.api.response_format import GrammarFields
from evenflow.server.api.tools import ToolFields

MOST_LOGPROBS = 20
MOST_STOPS = 16
MOST_STOP_CHARACTERS = 1000
_MOST_SEED = 2**63 - 1

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Prompt = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
)
StopText = Annotated[str, Field(min_length=1, max_length=MOST_STOP_CHARACTERS)]
Seconds = Annotated[float, Field(gt=0, le=MAX_TARGET_S)]
Duration = Seconds | Annotated[str, Field(pattern=DURATION_PATTERN)]
NumLogprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)]


def _only(allowed: bool) -> AfterValidator:
    """For a truth value that may be said but not changed. Literal would take 0 and 1 for it."""

    def check(value: bool) -> bool:
        if value is not allowed:
            raise ValueError(f"only {str(allowed).lower()} is supported")
        return value

    return AfterValidator(check)


OnlyTrue = Annotated[bool, _only(True), WithJsonSchema({"type": "boolean", "const": True})]
OnlyFalse = Annotated[bool, _only(False), WithJsonSchema({"type": "boolean", "const": False})]


def seconds_of(duration: float | str) -> float:
    """A number is seconds; text has a unit."""
    return parse_duration(duration) if isinstance(duration, str) else duration


class Body(BaseModel):
    """Types are taken as they are written: "1" is no number, 1 is no truth value."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    include_usage: bool | None = Field(default=None, description="End with a chunk that holds the usage.")
    continuous_usage_stats: bool | None = Field(default=None, description="Say the usage so far with every chunk.")
    include_obfuscation: bool | None = Field(default=None, description="Has no effect.")


class GenerationBody(Body, GrammarFields):
    """What a chat and a completion share."""

    model: str | None = Field(default=None, description="A name of /v1/models; without it, the first of them.")
    n: int | None = Field(default=None, ge=1, description="Answers to each prompt.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 or -1 keeps all tokens.")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), le=_MOST_SEED)
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_STOPS)] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    tbt_target: Duration | None = Field(
        default=None, description="Time between this stream's tokens: seconds or '50ms'."
    )
    ttft_target: Duration | None = Field(default=None, description="Time to the first token that is hoped for.")
    tenant: Annotated[str, Field(max_length=64)] | None = Field(
        default=None,
        description="Its requests share a prefix cache with nobody else's.",
    )
    user: str | None = Field(default=None, description="Has no effect.")
    metadata: dict[str, Any] | None = Field(default=None, description="Has no effect.")
    store: bool | None = Field(default=None, description="Has no effect: nothing is ever stored.")
    service_tier: str | None = Field(default=None, description="Has no effect.")
    safety_identifier: str | None = Field(default=None, description="Has no effect.")
    prompt_cache_key: str | None = Field(default=None, description="Has no effect: see tenant.")
    logit_bias: dict[str, float] | None = Field(default=None, max_length=0, description="Must be empty.")
    skip_special_tokens: OnlyTrue | None = None
    spaces_between_special_tokens: OnlyTrue | None = None
    include_stop_str_in_output: OnlyFalse | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream=true")
        return self

    @property
    def num_answers(self) -> int:
        return self.n or 1

    @property
    def streaming(self) -> StreamOptions | None:
        """How the answer is streamed; None: it is wanted whole."""
        return (self.stream_options or StreamOptions()) if self.stream else None

    def sampling(self, *, max_tokens: int, index: int, logprobs: int | None, grammar: Grammar | None) -> SamplingParams:
        """How to sample the answer of this index: each has a seed of its own."""
        stop = self.stop or ()
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": None if self.seed is None else (self.seed + index) & _MOST_SEED,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "prompt_logprobs": self.prompt_logprobs,
            "tbt_target": None if self.tbt_target is None else seconds_of(self.tbt_target),
            "ttft_target": None if self.ttft_target is None else seconds_of(self.ttft_target),
        }
        return SamplingParams(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=logprobs,
            grammar=grammar,
            **{name: value for name, value in given.items() if value is not None},
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt = Field(description="Text or token ids; a list of either is a batch.")
    max_tokens: int | None = Field(default=None, ge=0, description="By default 16; 0 is for echo and logprobs.")
    echo: bool | None = Field(default=None, description="Begin with the prompt.")
    logprobs: NumLogprobs | None = None
    best_of: int | None = Field(default=None, ge=1, le=1)
    suffix: None = None
    add_special_tokens: bool | None = Field(default=None, description="Put the model's first token before a text.")


class TextPart(Body):
    """A piece of a message's content; pieces are joined."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. Further fields go to the model's chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it: what is not said is not there."""
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer word; templates know the older
        return {**self.model_dump(exclude_none=True), "role": role}


class ChatBody(GenerationBody, ToolFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(default=None, ge=1, description="By default what the context holds.")
    max_completion_tokens: int | None = Field(default=None, ge=1, description="The newer name of max_tokens; it wins.")
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = Field(default=None, description="Let the template begin the answer's turn.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="For the model's chat template.")
    modalities: list[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs=true")
        return self

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected a prompt or messages, and not both")
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TargetBody(Body):
    """PUT /v1/target"""

    tbt_target: Duration | None = Field(
        description="Time between a stream's tokens: seconds, or '50ms'; 0.1 ms or more. null: keep no target."
    )
    paced: bool | None = Field(default=None, description="Streams that are ahead lend their slack; null: as before.")


BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TargetBody)
