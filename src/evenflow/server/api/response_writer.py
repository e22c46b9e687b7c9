"""What the responses of chats and completions share: ids, heads, server-sent events, engine requests.

`GenerationResponse` decides when to send what these write.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from evenflow.core.grammar import Grammar
from evenflow.core.request import Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.request_models import GenerationBody
from evenflow.server.api.service import ModelService

DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode

BodyType = TypeVar("BodyType", bound=GenerationBody)


def event_of(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


class ResponseWriter(ABC, Generic[BodyType]):
    """Writes the response to one HTTP request, whole or as events. The choices of a prompt have adjacent indexes."""

    def __init__(
        self,
        service: ModelService,
        body: BodyType,
        caller: Caller,
        *,
        id_prefix: str,
        object_name: str,
        event_start: bytes,
        num_prompts: int = 1,
    ) -> None:
        self.num_choices = num_prompts * body.num_choices
        service.gate.check_num_choices(self.num_choices)
        self.body = body
        self.tenant = body.tenant or ""
        self.cache_salt = caller.tenant(body.tenant)
        self._service = service
        self._id = f"{id_prefix}-{secrets.token_hex(12)}"
        model = service.model_name(body.model)
        self._head = {"id": self._id, "object": object_name, "created": int(time.time()), "model": model}
        # Everything before the text is the same in all events of a choice.
        start = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":%d,'
        self._event_starts = [start % index + event_start for index in range(self.num_choices)]

    @abstractmethod
    def prepare(self) -> list[Request]:
        """One engine request per choice. Tokenising takes long for long prompts: call it in a thread."""

    @abstractmethod
    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole response."""

    @abstractmethod
    def event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        """The event for a delta, empty if there is nothing to say; `usage` is JSON to include, or empty."""

    def first_event(self, index: int) -> bytes:
        """An event to send before the first delta of a choice, if any."""
        return b""

    def usage_event(self, usage: bytes) -> bytes:
        return event_of(encode_json(self._head)[:-1] + b',"choices":[],"usage":' + usage + b"}")

    def num_completion_tokens(self, output: RequestOutput) -> int:
        return len(output.token_ids)

    def _write_event(
        self, index: int, content: bytes, logprobs: bytes, finish_reason: str | None, usage: bytes
    ) -> bytes:
        reason = b"null" if finish_reason is None else encode_json(finish_reason)
        end = b'}],"usage":' + usage + b"}\n\n" if usage else b"}]}\n\n"
        return b"".join(
            (self._event_starts[index], content, b',"logprobs":', logprobs, b',"finish_reason":', reason, end)
        )

    def _requests(
        self, prompt: list[int], *, max_tokens: int, logprobs: int | None, grammar: Grammar | None, first_index: int = 0
    ) -> list[Request]:
        """The requests for all choices of one prompt, numbered from `first_index`."""
        requests = []
        for index in range(first_index, first_index + self.body.num_choices):
            sampling = self.body.sampling(max_tokens=max_tokens, index=index, logprobs=logprobs, grammar=grammar)
            request_id = self._id if self.num_choices == 1 else f"{self._id}-{index}"
            requests.append(
                self._service.client.prepare(prompt, sampling, request_id=request_id, tenant=self.cache_salt)
            )
        return requests
