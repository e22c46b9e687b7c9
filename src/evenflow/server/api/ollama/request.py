"""The bodies of Ollama's API, checked field by field, and the chats and completions that they mean.

As in the other APIs here, unknown fields are refused, and fields that change nothing say so.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from evenflow.server.api.embeddings import MANY, EmbeddingsBody
from evenflow.server.api.request_models import (
    MAX_INT,
    MAX_MESSAGES,
    MAX_STOPS,
    ChatBody,
    ChatMessage,
    CompletionBody,
    ServiceFields,
    StopText,
    Text,
)
from evenflow.server.api.response_format import StrictModel
from evenflow.server.api.tools import MAX_TOOLS

_NO_EFFECT = "Has no effect: the engine decides this for all requests."
_DEFAULTS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}  # Ollama's
_SAME_OPTIONS = ("seed", "stop", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
Images = Annotated[list[Any], Field(max_length=0)]


class Options(StrictModel):
    num_predict: int | None = Field(None, ge=-2, le=MAX_INT, description="-1 and -2: up to the end of the context.")
    temperature: float | None = Field(None, ge=0, le=2, description="By default 0.8, as in Ollama.")
    top_k: int | None = Field(None, ge=0, le=MAX_INT, description="By default 40; 0 keeps all tokens.")
    top_p: float | None = Field(None, gt=0, le=1, description="By default 0.9.")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), le=MAX_INT)
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    repeat_penalty: float | None = Field(None, ge=0.01, le=10, description="By default none.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    num_ctx: int | None = Field(None, description="Has no effect: the context is the server's --max-model-len.")
    num_keep: int | None = Field(None, description="Has no effect: a prompt over the context is refused, not cut.")
    repeat_last_n: int | None = Field(None, description="Has no effect: penalties count the whole text.")
    mirostat: int | None = Field(None, ge=0, le=0, description="Must be 0: there is no such sampler.")
    mirostat_eta: float | None = Field(None, description="Has no effect without it.")
    mirostat_tau: float | None = Field(None, description="Has no effect without it.")
    num_batch: int | None = Field(None, description=_NO_EFFECT)
    num_gpu: int | None = Field(None, description=_NO_EFFECT)
    main_gpu: int | None = Field(None, description=_NO_EFFECT)
    num_thread: int | None = Field(None, description=_NO_EFFECT)
    use_mmap: bool | None = Field(None, description=_NO_EFFECT)
    use_mlock: bool | None = Field(None, description=_NO_EFFECT)
    numa: bool | None = Field(None, description=_NO_EFFECT)
    low_vram: bool | None = Field(None, description=_NO_EFFECT)

    @field_validator("num_predict")
    @classmethod
    def _check_num_predict(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("expected at least 1 token, or -1 for as many as fit")
        return value


class _Body(StrictModel, ServiceFields):
    model: str = Field(description="A name from /api/tags; :latest may follow it.")
    stream: bool | None = Field(None, description="Lines of JSON, by default; false: one object.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(None, description="json, or a JSON schema.")
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = Field(
        None, description="For chat templates that take it, as enable_thinking and reasoning_effort."
    )
    keep_alive: str | float | None = Field(None, description="Has no effect: the model stays loaded.")

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def max_tokens(self) -> int | None:
        """None: as many as fit."""
        asked = None if self.options is None else self.options.num_predict
        return None if asked is None or asked < 0 else asked

    def fields(self) -> dict[str, Any]:
        """Those that chats and completions share."""
        options = self.options or Options.model_validate({})
        given = {name: value for name in _SAME_OPTIONS if (value := getattr(options, name)) is not None}
        if options.temperature is not None:
            given["temperature"] = options.temperature
        if options.repeat_penalty is not None:
            given["repetition_penalty"] = options.repeat_penalty
        given |= {name: value for name in ServiceFields.model_fields if (value := getattr(self, name)) is not None}
        if self.format == "json":
            given["response_format"] = {"type": "json_object"}
        elif isinstance(self.format, dict):
            given["guided_json"] = self.format
        return {**_DEFAULTS, **given, "stream": self.streams}

    def as_chat(self, model: str, messages: list[ChatMessage], **more: Any) -> ChatBody:
        if isinstance(self.think, str):
            more["reasoning_effort"] = self.think
        elif self.think is not None:
            more["chat_template_kwargs"] = {"enable_thinking": self.think}
        return ChatBody(model=model, messages=messages, max_tokens=self.max_tokens, **self.fields(), **more)


class OllamaFunction(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = Field(None, description="Has no effect.")
    description: str | None = Field(None, description="Has no effect.")


class OllamaCall(StrictModel):
    """A call that the model made. Ollama's calls have no ids."""

    id: str | None = None
    index: int | None = Field(None, description="Has no effect.")
    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaMessage(StrictModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images | None = Field(None, description="Must be empty: this server reads only text.")
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_name: str | None = Field(None, description="Of a tool's message.")
    tool_call_id: str | None = None


class OllamaChatBody(_Body):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        default_factory=list, description="Without any, the response only says that the model is loaded."
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    def chat(self, model: str) -> ChatBody:
        more: dict[str, Any] = {"tools": self.tools} if self.tools else {}
        return self.as_chat(model, _messages(self.messages), **more)


class OllamaGenerateBody(_Body):
    """POST /api/generate"""

    prompt: str = Field("", description="Without one, the response only says that the model is loaded.")
    system: str | None = None
    suffix: str | None = Field(
        None, description="The text after the one to fill in; the prompt is then taken as it is."
    )
    raw: bool | None = Field(None, description="Take the prompt as it is, without the chat template.")
    images: Images | None = Field(None, description="Must be empty: this server reads only text.")
    template: Annotated[str, Field(max_length=0)] | None = Field(
        None, description="Must be empty: the model has its own."
    )
    context: list[int] | None = Field(None, description="Has no effect: send the conversation to /api/chat instead.")

    @property
    def is_plain(self) -> bool:
        """Without the chat template."""
        return bool(self.raw or self.suffix)

    def chat(self, model: str) -> ChatBody:
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        return self.as_chat(model, [*system, ChatMessage(role="user", content=self.prompt)])

    def completion(self, model: str) -> CompletionBody:
        fields = {**self.fields(), "suffix": self.suffix or None, "max_tokens": self.max_tokens}
        return CompletionBody(model=model, prompt=self.prompt, **fields)


class _EmbeddingBody(StrictModel, ServiceFields):
    model: str = Field(description="A name from /api/tags; :latest may follow it.")
    options: Options | None = Field(None, description="Has no effect: nothing is sampled.")
    keep_alive: str | float | None = Field(None, description="Has no effect: the model stays loaded.")

    def embeddings(self, texts: str | list[str], **more: Any) -> EmbeddingsBody:
        given = {name: value for name in ServiceFields.model_fields if (value := getattr(self, name)) is not None}
        return EmbeddingsBody(model=self.model, input=texts, **given, **more)


class OllamaEmbedBody(_EmbeddingBody):
    """POST /api/embed"""

    input: Text | Annotated[list[Text], MANY] = Field(description="A text, or several.")
    truncate: bool | None = Field(None, description="Keep the last tokens of a longer text; false: refuse it.")
    dimensions: int | None = Field(None, ge=1, le=MAX_INT, description="Keep the first ones, at unit length.")

    def as_openai(self) -> EmbeddingsBody:
        return self.embeddings(
            self.input, dimensions=self.dimensions, truncate_prompt_tokens=None if self.truncate is False else -1
        )


class OllamaEmbeddingsBody(_EmbeddingBody):
    """POST /api/embeddings, the older route for one text."""

    prompt: Text

    def as_openai(self) -> EmbeddingsBody:
        return self.embeddings(self.prompt, truncate_prompt_tokens=-1)


class OllamaShowBody(StrictModel):
    """POST /api/show"""

    model: str | None = Field(None, description="A name from /api/tags.")
    name: str | None = Field(None, description="Older name of the same.")
    verbose: bool | None = Field(None, description="Has no effect.")


OLLAMA_BODIES = (OllamaChatBody, OllamaGenerateBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaShowBody)


def _messages(messages: list[OllamaMessage]) -> list[ChatMessage]:
    """With ids for calls, in order, and for the results that follow them."""
    found: list[ChatMessage] = []
    num_calls = num_results = 0
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        calls = []
        for call in message.tool_calls or ():
            function = {"name": call.function.name, "arguments": call.function.arguments}
            calls.append({"id": call.id or f"call_{num_calls}", "type": "function", "function": function})
            num_calls += 1
        if calls:
            fields["tool_calls"] = calls
        if message.role == "tool":
            fields["tool_call_id"] = message.tool_call_id or f"call_{num_results}"
            if message.tool_name:
                fields["name"] = message.tool_name
            num_results += 1
        found.append(ChatMessage.model_validate(fields))
    return found
