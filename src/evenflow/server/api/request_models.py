"""The bodies of requests, checked field by field.

Unknown fields are refused, as OpenAI's API does, so nothing is silently ignored. Fields that OpenAI or vLLM have and
that change nothing here say so.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, WithJsonSchema, model_validator

from evenflow.core.grammar import Grammar
from evenflow.core.request import ALL_LOGPROBS, MAX_TOP_K, SamplingParams
from evenflow.duration import DURATION_PATTERN, MIN_TARGET_S, NEEDS_UNIT_S, parse_target
from evenflow.errors import InvalidRequest
from evenflow.model.text.tool_messages import Role
from evenflow.server.api.response_format import GrammarFields, StrictModel
from evenflow.server.api.token_fields import TokenFields, TokenId
from evenflow.server.api.tools import TemplateFields, ToolFields

MAX_LOGPROBS = 20
DEFAULT_TEMPERATURE = 1.0  # OpenAI's
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_MESSAGES = 1 << 14
MAX_SALT_CHARACTERS = 256
FEW = Field(max_length=1024, fail_fast=True)
MAX_INT = 2**63 - 1  # of a field without a bound of its own: no message between processes takes more
_SAMPLING_FIELDS = (  # that SamplingParams takes as they are
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
)

TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1)]
Prompt = (
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
)


def as_batch(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """The prompts, each a text or token ids."""
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


def _checked(target: float | str, field: ValidationInfo) -> float | str:
    parse_target(target, name=field.field_name or "")
    return target


_TARGET_NUMBER = WithJsonSchema({"type": "number", "minimum": MIN_TARGET_S, "exclusiveMaximum": NEEDS_UNIT_S})
_TARGET_TEXT = WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
Target = Annotated[Annotated[float, _TARGET_NUMBER] | Annotated[str, _TARGET_TEXT], AfterValidator(_checked)]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "standard_only"]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _only(allowed: bool) -> AfterValidator:
    """For a boolean with one supported value. Literal would also take 0 and 1."""

    def check(value: bool) -> bool:
        if value is not allowed:
            raise ValueError(f"only {str(allowed).lower()} is supported")
        return value

    return AfterValidator(check)


OnlyTrue = Annotated[bool, _only(True), WithJsonSchema({"type": "boolean", "const": True})]
OnlyFalse = Annotated[bool, _only(False), WithJsonSchema({"type": "boolean", "const": False})]


class StreamOptions(StrictModel):
    include_usage: bool | None = Field(default=None, description="Send the usage in a last chunk.")
    continuous_usage_stats: bool | None = Field(default=None, description="Send the usage so far with every chunk.")
    include_obfuscation: bool | None = Field(default=None, description="Has no effect.")


class ServiceFields(BaseModel):
    """How a request is to be served: the same fields in every API."""

    tbt_target: Target | None = Field(None, description="Target time between this stream's tokens: seconds or '50ms'.")
    ttft_target: Target | None = Field(None, description="Target time to the first token.")
    deadline: Target | None = Field(
        None, description="Time after its arrival at which the request ends if its answer is not complete."
    )
    tenant: Annotated[str, Field(max_length=64)] | None = Field(None, description="Tenants do not share prefix caches.")
    service_class: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="The name of a class of service."
    )
    priority: int | None = Field(
        None, ge=-MAX_INT, le=MAX_INT, description="Another way to name the class: lower is more urgent, 0 the default."
    )
    service_tier: ServiceTier | None = Field(
        None, description="A third: flex is the least urgent class, priority the most urgent, all others the default."
    )

    @property
    def tbt_seconds(self) -> float | None:
        return None if self.tbt_target is None else parse_target(self.tbt_target)

    @property
    def targets(self) -> dict[str, Any]:
        """For `SamplingParams`."""
        return {name: getattr(self, name) for name in ("tbt_target", "ttft_target", "deadline")}


class EngineBody(StrictModel, ServiceFields):
    """The fields of everything that the engine computes."""

    model: str | None = Field(None, description="A name from /v1/models; by default the first.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_INT, description="Keep the last tokens of a longer prompt; -1: what fits the context."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = Field(
        None, description="Requests with different salts do not share prefix caches."
    )
    user: str | None = Field(None, description="Has no effect.")

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens is -1 or at least 1")
        return self

    @property
    def num_choices(self) -> int:
        """To generate per prompt."""
        return 1

    @property
    def streaming(self) -> StreamOptions | None:
        """How to stream; None asks for one whole response."""
        return None


class GenerationBody(EngineBody, GrammarFields, TokenFields):
    """The fields that chats and completions share."""

    n: int | None = Field(None, ge=1, le=MAX_INT, description="Choices per prompt.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="0 or -1 keeps all tokens.")
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_INT)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = Field(
        None, ge=ALL_LOGPROBS, le=MAX_LOGPROBS, description="-1: of the whole vocabulary, for short prompts."
    )
    return_token_ids: bool | None = Field(None, description="Send the prompt's and the output's token ids too.")
    metadata: dict[str, Any] | None = Field(None, description="Has no effect.")
    store: bool | None = Field(None, description="Has no effect: nothing is ever stored.")
    safety_identifier: str | None = Field(None, description="Has no effect.")
    prompt_cache_key: str | None = Field(None, description="Has no effect: see tenant.")
    skip_special_tokens: bool | None = Field(None, description="true by default; false shows control tokens as text.")
    spaces_between_special_tokens: OnlyTrue | None = None
    include_stop_str_in_output: bool | None = Field(
        None, description="End the text with the stop string or token that was met; false by default: before it."
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is allowed only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs is not allowed with stream=true: events do not have them")
        return self

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def streaming(self) -> StreamOptions | None:
        return (self.stream_options or StreamOptions()) if self.stream else None

    def check_size(self, num_choices: int) -> None:
        super().check_size(num_choices)
        if self.prompt_logprobs == ALL_LOGPROBS and num_choices > 1:
            raise InvalidRequest(f"Got prompt_logprobs=-1 with {num_choices} choices but expected one.")

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Top logprobs per output token; None: no logprobs."""

    @property
    def num_sampled_logprobs(self) -> int | None:
        """The same for the engine, which may need them for more than the response."""
        return self.num_logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    def sampling(
        self, *, max_tokens: int, index: int, grammar: Grammar | None, scores_prompt: bool = True
    ) -> SamplingParams:
        """For the choice of this index: each has its own seed."""
        stop = self.stop or ()
        given: dict[str, Any] = {
            **{name: getattr(self, name) for name in _SAMPLING_FIELDS},
            "top_k": None if self.top_k is None else min(max(self.top_k, 0), MAX_TOP_K),
            "seed": None if self.seed is None else (self.seed + index) & MAX_INT,
            "prompt_logprobs": self.num_prompt_logprobs if scores_prompt else None,
            **self.targets,
        }
        if self.temperature is None:
            given["temperature"] = DEFAULT_TEMPERATURE
        return SamplingParams(
            max_tokens=max_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logprobs=self.num_sampled_logprobs,
            grammar=grammar,
            **self.token_rules,
            **{name: value for name, value in given.items() if value is not None},
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Prompt = Field(description="Text or token ids; a list of either is a batch.")
    max_tokens: int | None = Field(
        None, ge=0, le=MAX_INT, description="16 by default; 0 to only echo or score the prompt."
    )
    echo: bool | None = Field(None, description="Start the text with the prompt.")
    logprobs: NumLogprobs | None = None
    best_of: int | None = Field(
        None, ge=1, le=MAX_INT, description="Generate this many choices per prompt; return the n likeliest per token."
    )
    suffix: str | None = Field(None, description="The text after the one to fill in, for models trained to do so.")
    add_special_tokens: bool | None = Field(None, description="Prepend the model's BOS token to text.")

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of is {self.best_of} but n choices are returned of them: n is {self.n}")
        if self.num_choices > self.num_returned and self.stream:
            raise ValueError("best_of is not allowed with stream=true: which choice is best is known at the end")
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise ValueError("echo and truncate_prompt_tokens are not allowed with a suffix")
        return self

    @property
    def num_choices(self) -> int:
        return self.best_of or self.num_returned

    @property
    def num_returned(self) -> int:
        """Choices per prompt in the response."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_sampled_logprobs(self) -> int | None:
        is_ranked = self.num_choices > self.num_returned
        return 0 if is_ranked and self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Logprobs with echo include the prompt's."""
        if self.echo and self.logprobs is not None and self.prompt_logprobs != ALL_LOGPROBS:
            return max(self.logprobs, self.prompt_logprobs or 0)
        return self.prompt_logprobs


class TextPart(StrictModel):
    """A part of a message's content; the template gets them as lines."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. Other fields are passed to the model's chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role
    content: str | Annotated[list[TextPart], FEW] | None = None
    tool_calls: Annotated[list[dict[str, Any]], FEW] | None = None

    def texts(self) -> Iterator[str]:
        """The texts of its content."""
        if isinstance(self.content, str):
            yield self.content
        else:
            yield from (part.text for part in self.content or ())

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message with role {self.role!r} needs content")
        return self


class ChatBody(GenerationBody, ToolFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT, description="By default, up to the end of the context.")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_INT, description="Newer name of max_tokens; takes precedence."
    )
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="For chat templates that take it; none also sets enable_thinking to false."
    )
    modalities: Annotated[list[Literal["text"]], FEW] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Has no effect.")
    prediction: dict[str, Any] | None = Field(None, description="Has no effect.")
    prompt_cache_retention: str | None = Field(None, description="Has no effect.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Has no effect.")
    audio: None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")
    moderation: None = Field(None, description="Not supported.")
    functions: None = Field(None, description="Not supported: see tools.")
    function_call: None = Field(None, description="Not supported: see tool_choice.")

    @model_validator(mode="after")
    def _check_last_turn(self) -> ChatBody:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message is not allowed with add_generation_prompt=true")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        given = super().template_variables
        if self.reasoning_effort is None:
            return given
        implied: dict[str, Any] = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            implied["enable_thinking"] = False
        return implied | given

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is allowed only with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(StrictModel, TemplateFields):
    """POST /tokenize: a text, or a conversation rendered by the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected either prompt or messages")
        return self


class DetokenizeBody(StrictModel):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TargetBody(StrictModel):
    """PUT /v1/target"""

    tbt_target: Target | None = Field(
        description="Time between a stream's tokens: seconds or '50ms'; at least 0.1 ms. null: keep no target."
    )
    paced: bool | None = Field(None, description="Streams that are ahead lend their slack; null: unchanged.")


BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TargetBody)
