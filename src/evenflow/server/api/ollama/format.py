"""POST /api/chat and /api/generate: responses in the form of Ollama's API, whole or as lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.completions import CompletionFormat
from evenflow.server.api.conversation import Conversation
from evenflow.server.api.embeddings import EmbeddingsFormat, as_numbers
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.ollama.request import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
)
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.service import ModelService
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.errors import ApiError

_LINES = {"content-type": "application/x-ndjson"}


def head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


class _RawPrompt(CompletionFormat):
    """A text that is continued as it is, by default up to the end of the context."""

    def prepare(self, rendered: str) -> list[Prepared]:
        [prompt] = self._prompts
        token_ids = self._prompt(prompt)
        self.job.service.check_length(len(token_ids), None, "prompt")
        fitting = self._size().tokens_that_fit(len(token_ids))
        asked = self._body.max_tokens
        return self.job.requests(self._body, token_ids, fitting if asked is None else min(asked, fitting))


class _OllamaFormat:
    """What both routes have in common: `_said` is the part with the text."""

    def __init__(self, source: Conversation | _RawPrompt, asked_model: str, *, streams: bool) -> None:
        self.job = source.job
        self.template_question, self.prepare = source.template_question, source.prepare
        self._conversation = source if isinstance(source, Conversation) else None
        self._asked_model = asked_model
        self._calls: list[dict[str, Any]] = []  # that the model makes, their arguments as text so far
        self._began_at = time.perf_counter()
        if streams:
            self.job.headers = _LINES

    def _said(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        [output] = outputs
        text = self._take(output.text, is_last=True)
        return {**head(self._asked_model), **self._said(text, self._parsed_calls()), **self._ending(output)}

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        is_last = delta.finish_reason is not None
        text, start = self._take(delta.text, is_last), head(self._asked_model)
        calls = self._parsed_calls() if is_last else []
        line = _line({**start, **self._said(text, calls), "done": False}) if text or calls else b""
        return line + _line({**start, **self._said("", []), **self._ending(delta.output)}) if is_last else line

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        return b""  # the line of the last delta has the figures

    def failure_events(self, error: ApiError, path: str) -> bytes:
        return _line(error.body(path))

    def _take(self, text: str, is_last: bool) -> str:
        """The part that is text; calls are kept until they are whole."""
        if self._conversation is None:
            return text
        said = []
        for delta in self._conversation.deltas(text, is_last):
            if "content" in delta:
                said.append(delta["content"])
                continue
            [piece] = delta["tool_calls"]
            if piece["index"] == len(self._calls):
                self._calls.append({"name": piece["function"]["name"], "arguments": ""})
            self._calls[-1]["arguments"] += piece["function"]["arguments"]
        return "".join(filter(None, said))

    def _parsed_calls(self) -> list[dict[str, Any]]:
        return [{"function": {"name": one["name"], "arguments": _parsed(one["arguments"])}} for one in self._calls]

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        """Times are in nanoseconds. The prompt's count includes cached tokens."""
        times = output.token_times_s
        first, last = (times[0], times[-1]) if times else (0.0, 0.0)
        return {
            "done": True,
            "done_reason": "length" if output.finish_reason == FinishReason.LENGTH else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - self._began_at),
            "load_duration": 0,
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": len(output.token_ids),
            "eval_duration": _nanoseconds(last - first),
        }


class OllamaChatFormat(_OllamaFormat):
    def __init__(self, service: ModelService, body: OllamaChatBody, caller: Caller) -> None:
        chat = body.chat(body.model)
        conversation = Conversation(service, chat, caller, id_prefix="ollama-", ends_with_context=True)
        super().__init__(conversation, body.model, streams=body.streams)

    def _said(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}}


class OllamaGenerateFormat(_OllamaFormat):
    def __init__(self, service: ModelService, body: OllamaGenerateBody, caller: Caller) -> None:
        source: Conversation | _RawPrompt
        if body.is_plain:
            source = _RawPrompt(service, body.completion(body.model), caller)
        else:
            source = Conversation(
                service, body.chat(body.model), caller, id_prefix="ollama-", param="prompt", ends_with_context=True
            )
        super().__init__(source, body.model, streams=body.streams)

    def _said(self, text: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text}


class OllamaEmbedFormat(EmbeddingsFormat):
    """Of /api/embed, and of the older /api/embeddings for one text."""

    def __init__(self, service: ModelService, body: OllamaEmbedBody | OllamaEmbeddingsBody, caller: Caller) -> None:
        super().__init__(service, body.as_openai(), caller)
        self._asked = body
        self._began_at = time.perf_counter()

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        vectors = [as_numbers(vector) for vector in self.vectors(outputs)]
        if isinstance(self._asked, OllamaEmbeddingsBody):
            return {"embedding": vectors[0]}
        return {
            "model": self._asked.model,
            "embeddings": vectors,
            "total_duration": _nanoseconds(time.perf_counter() - self._began_at),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
        }


def _parsed(arguments: str) -> dict[str, Any]:
    """Ollama's calls have parsed arguments. A call that was cut off has none that can be parsed."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}


def _line(content: dict[str, Any]) -> bytes:
    return encode_json(content) + b"\n"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
