"""POST /v1/responses: writes the answer of a chat as a response of OpenAI's Responses API, or as its events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.server.access import Caller
from evenflow.server.api.conversation import Conversation
from evenflow.server.api.formats import named_event
from evenflow.server.api.job import served_tier
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.logprobs import chat_row
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.responses.chat_request import chat_request
from evenflow.server.api.responses.items import Item, MessageItem, ReasoningItem, as_stored, read_items
from evenflow.server.api.responses.output import Event, OutputItems
from evenflow.server.api.responses.request import ResponsesBody
from evenflow.server.api.responses.store import ResponseStore, StoredResponse
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError


class ResponsesFormat:
    """One response, which is stored unless the client asked not to."""

    def __init__(
        self,
        service: ModelService,
        store: ResponseStore,
        asked: ResponsesBody,
        previous: StoredResponse | None,
        caller: Caller,
    ) -> None:
        items = _conversation(asked, previous)
        chat = chat_request(asked, items)
        # A stream's last events repeat the text.
        conversation = Conversation(service, chat, caller, id_prefix="resp_", param="input", times_streamed=4)
        self._conversation = conversation
        self.job = conversation.job
        self.template_question, self.prepare = conversation.template_question, conversation.prepare
        self._asked = asked
        self._store = store
        self._tokenizer = service.tokenizer
        self._num_top = chat.num_logprobs
        self._output = OutputItems()
        self._created_at = int(time.time())
        self._reason: str | None = None  # why the output ended
        self._num_events = 0
        self._num_logprob_bytes = 0
        self._items = encode_json([as_stored(item) for item in items]) if asked.is_stored else b""
        tier = served_tier(asked.service_tier, self.job.service_class, service.client.classes)
        self._settings = _settings(asked, tier)
        # A stream's first events have them twice, its last one again.
        conversation.repeated_bytes = len(encode_json(self._settings)) * (3 if asked.stream else 1)

    # ---- whole ----

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        [output] = outputs
        for _ in self._take(output.text, output.logprobs or LogprobRows(), output.finish_reason):
            pass  # these events are only for streams
        return self._finish(usage)

    # ---- streamed ----

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        events = self._take(delta.text, rows, delta.finish_reason)
        return self._write(events if self._num_events else chain(self._first_events(), events))

    def _first_events(self) -> Iterator[Event]:
        response = self._describe("in_progress")
        for name in ("created", "in_progress"):
            yield {"type": f"response.{name}", "response": response}

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        if self._reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return b""  # the client is gone; half a response is not stored
        response = self._finish(usage)
        return self._write([{"type": f"response.{response['status']}", "response": response}])

    def failure_events(self, error: ApiError, path: str) -> bytes:
        ended = list(self._output.end(is_complete=False)) if self._output.items else []
        described = error.body(path)["error"]
        response = self._describe("failed", error={"code": "server_error", "message": described["message"]})
        code = described["code"] or described["type"]
        failed = {"type": "error", "code": code, "message": described["message"], "param": described["param"]}
        return self._write([*ended, failed, {"type": "response.failed", "response": response}])

    def _write(self, events: Iterable[Event]) -> bytes:
        written = []
        for event in events:
            written.append(named_event({"type": event["type"], "sequence_number": self._num_events, **event}))
            self._num_events += 1
        return b"".join(written)

    # ---- both ----

    def _take(self, text: str, rows: LogprobRows, reason: str | None) -> Iterator[Event]:
        """Add what the model wrote to the output. Its logprobs are kept as JSON, which is far smaller than objects."""
        is_last = reason is not None
        tokenizer, num_top = self._tokenizer, self._num_top
        logprobs: Sequence[msgspec.Raw] = ()
        if num_top is not None:
            written = [encode_json(chat_row(tokenizer, num_top, row)) for row in rows]
            self._num_logprob_bytes += sum(map(len, written))
            logprobs = list(map(msgspec.Raw, written))
        for delta in self._conversation.deltas(text, is_last):
            yield from self._output.add(delta, logprobs)
            logprobs = ()
        if is_last:
            self._reason = reason
            yield from self._output.end(is_complete=reason != FinishReason.LENGTH)

    def _finish(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The response when its output has ended; stored if that was asked for."""
        is_cut = self._reason == FinishReason.LENGTH
        response = self._describe(
            "incomplete" if is_cut else "completed",
            completed_at=None if is_cut else int(time.time()),
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            usage=_usage(usage),
        )
        if self._asked.is_stored and self._store.may_keep(self._num_logprob_bytes):  # else it is not even written
            stored = StoredResponse(
                owner=self.job.caller.client,
                tenant=self.job.tenant,
                share=self.job.share,
                response=encode_json(response),
                input_items=self._items,
                output_items=encode_json(self._output.items),
            )
            self._store.add(self.job.id, stored)
        return response

    def _describe(self, status: str, **changes: Any) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.job.model,
            "output": self._output.items,
            **self._settings,
            "usage": None,
            **changes,
        }


def _conversation(asked: ResponsesBody, previous: StoredResponse | None) -> list[Item]:
    """All items that the model is to read."""
    given: Sequence[Item]
    if isinstance(asked.input, str):
        given = [MessageItem.model_validate({"role": "user", "content": asked.input})]
    else:
        given = asked.input
    new: list[Item] = [item for item in given if not isinstance(item, ReasoningItem)]
    if not new:
        raise InvalidRequest("Got only reasoning items in input but expected a message or the output of a call.")
    if previous is None:
        return new
    return [*read_items(previous.input_items), *read_items(previous.output_items), *new]


def _settings(asked: ResponsesBody, tier: str) -> dict[str, Any]:
    """What a response repeats of its request, with the defaults filled in."""
    choice = asked.tool_choice or "auto"
    text = asked.text.model_dump(exclude_none=True, by_alias=True) if asked.text else {}
    return {
        "background": False,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata or {},
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.reasoning.effort if asked.reasoning else None, "summary": None},
        "safety_identifier": asked.safety_identifier,
        "service_tier": tier,
        "store": asked.is_stored,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": _raw({"format": {"type": "text"}, **text}, "text"),
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": _raw([tool.model_dump() for tool in asked.tools or ()], "tools"),
        "top_logprobs": asked.top_logprobs or 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "user": asked.user,
    }


def _raw(value: object, name: str) -> msgspec.Raw:
    """Written once for all events. Schemas may hold integers that only this encoder takes."""
    try:
        return msgspec.Raw(json.dumps(value, allow_nan=False).encode())
    except ValueError as error:
        raise InvalidRequest(f"Got {name} that cannot be written as JSON: {error}.") from error


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    """No token is one of reasoning: what the model writes is returned as it is."""
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": chat["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }
