"""POST /v1/responses: writes the answer of a chat as a response of OpenAI's Responses API, or as its events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.server.access import Caller
from evenflow.server.api.chat import ChatWriter
from evenflow.server.api.class_choice import served_tier
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.logprobs import chat_row
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.response_size import written_bytes
from evenflow.server.api.response_writer import named_event
from evenflow.server.api.responses.chat_request import chat_request
from evenflow.server.api.responses.items import Item, MessageItem, ReasoningItem, as_stored, read_items
from evenflow.server.api.responses.output import Event, OutputItems
from evenflow.server.api.responses.request import ResponsesBody
from evenflow.server.api.responses.store import ResponseStore, StoredResponse
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError


class ResponsesWriter(ChatWriter):
    """Writes one response, and stores it unless the client asked not to."""

    _ID_PREFIX = "resp_"
    _PROMPT_PARAM = "input"
    _TIMES_STREAMED = 4  # its last events repeat the text

    def __init__(
        self,
        service: ModelService,
        store: ResponseStore,
        asked: ResponsesBody,
        previous: StoredResponse | None,
        caller: Caller,
    ) -> None:
        items = _conversation(asked, previous)
        super().__init__(service, chat_request(asked, items), caller)
        self._asked = asked
        self._store = store
        self._output = OutputItems()
        self._reason: str | None = None  # why the output ended
        self._num_events = 0
        self._num_logprob_bytes = 0
        self._items = encode_json([as_stored(item) for item in items]) if asked.is_stored else b""
        tier = served_tier(asked.service_tier, self.service_class, service.client.classes)
        self._settings = _settings(asked, tier)

    def _repeated_bytes(self) -> int:
        """A stream's first events have them twice, its last one again."""
        return len(encode_json(self._settings)) * (3 if self.body.stream else 1)

    # ---- whole ----

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        [output] = outputs
        for _ in self._take(output.text, output.logprobs or LogprobRows(), output.finish_reason):
            pass  # these events are only for streams
        return self._finish(usage)

    # ---- streamed ----

    def first_event(self, index: int, usage: bytes) -> bytes:
        response = self._describe("in_progress")
        return self._write({"type": f"response.{name}", "response": response} for name in ("created", "in_progress"))

    def event_bytes(self, delta: Delta, rows: LogprobRows) -> int:
        """The last one repeats all of them."""
        num_times = 1 if delta.finish_reason is None else len(delta.output.token_ids) // max(1, len(rows))
        return num_times * written_bytes(rows)

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        return self._write(self._take(delta.text, rows, delta.finish_reason))

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
        tokenizer, num_top = self._service.tokenizer, self._num_logprobs
        logprobs: Sequence[msgspec.Raw] = ()
        if num_top is not None:
            written = [encode_json(chat_row(tokenizer, num_top, row)) for row in rows]
            self._num_logprob_bytes += sum(map(len, written))
            logprobs = list(map(msgspec.Raw, written))
        for delta in self._deltas(text, is_last):
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
                owner=self.caller.client,
                tenant=self.tenant,
                share=self.share,
                response=encode_json(response),
                input_items=self._items,
                output_items=encode_json(self._output.items),
            )
            self._store.add(self._id, stored)
        return response

    def _describe(self, status: str, **changes: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._head["model"],
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
