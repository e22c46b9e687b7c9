"""Who answers in `evenflow chat`: the embedded engine, or a server with OpenAI's chat API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenflow.bench.endpoints import HttpEndpoint, event_lines
from evenflow.core.request import SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.engine.base_llm import Conversation
from evenflow.errors import EndpointFailed, InvalidRequest


class Partner(Protocol):
    """Answers a conversation, in pieces of text."""

    def answer(self, messages: Conversation) -> AsyncGenerator[str]: ...


@dataclass(frozen=True, slots=True)
class EmbeddedPartner:
    llm: AsyncLLM
    sampling: SamplingParams
    max_tokens: int | None  # None: up to the end of the context

    async def answer(self, messages: Conversation) -> AsyncGenerator[str]:
        prompt = self.llm.encode_chat(messages)
        max_tokens = self.max_tokens or max(1, self.llm.max_model_len - len(prompt))
        async for delta in self.llm.stream(prompt, replace(self.sampling, max_tokens=max_tokens)):
            if delta.output.error is not None:
                raise InvalidRequest(delta.output.error)
            yield delta.text


@dataclass(slots=True)
class ServedPartner(HttpEndpoint):
    """Open it first."""

    sampling: dict[str, Any] = field(default_factory=dict)  # fields of the request

    async def answer(self, messages: Conversation) -> AsyncGenerator[str]:
        import httpx

        assert self._client is not None, "the endpoint is not open"
        body = {"model": self.model, "messages": messages, "stream": True, **self.sampling}
        try:
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    content = (await response.aread()).decode(errors="replace")
                    raise EndpointFailed(f"{self.name}: status {response.status_code}: {_message(content)}")
                async for line in event_lines(response):
                    if line.startswith("data:") and not line.endswith("[DONE]"):
                        yield _piece(self.name, json.loads(line.removeprefix("data:")))
        except httpx.HTTPError as error:
            raise EndpointFailed(f"{self.name}: {error or type(error).__name__}") from error


def _piece(name: str, event: dict[str, Any]) -> str:
    if "error" in event:
        raise EndpointFailed(f"{name}: {event['error'].get('message', event['error'])}")
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())


def _message(content: str) -> str:
    """What OpenAI's format of errors says, or the whole body."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return " ".join(content.split())[:200]
