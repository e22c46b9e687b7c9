"""Who answers in `evenflow chat`: the embedded engine, or a server with OpenAI's chat API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from evenflow.bench.endpoints import HttpEndpoint
from evenflow.core.request import SamplingParams
from evenflow.engine.async_llm import AsyncLLM
from evenflow.engine.prompts import Conversation
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
        body = {"model": self.model, "messages": messages, "stream": True, **self.sampling}
        try:
            async with aclosing(self.events("/v1/chat/completions", body)) as events:
                async for event in events:
                    yield "".join(choice["delta"].get("content") or "" for choice in event.get("choices") or ())
        except EndpointFailed as error:
            raise EndpointFailed(f"{self.name}: {error}") from error
