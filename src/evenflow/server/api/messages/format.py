"""POST /v1/messages: a chat whose request and response have the form of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.conversation import Conversation
from evenflow.server.api.formats import failed_stream, named_event
from evenflow.server.api.messages.chat_request import as_chat
from evenflow.server.api.messages.events import PING, BlockEvents
from evenflow.server.api.messages.request import MessagesBody
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.service import ModelService
from evenflow.server.error_shapes import new_request_id

_NO_END = {"stop_reason": None, "stop_sequence": None}  # of a message that begins, also if its first token is its last


class MessagesFormat:
    """One message, whole or as events."""

    failure_events = staticmethod(failed_stream)

    def __init__(self, service: ModelService, body: MessagesBody, caller: Caller) -> None:
        # As in Anthropic's API, max_tokens may exceed the context, which then ends the output.
        conversation = Conversation(service, as_chat(body), caller, id_prefix="msg_", ends_with_context=True)
        self._conversation = conversation
        self.job = conversation.job
        self.template_question, self.prepare = conversation.template_question, conversation.prepare
        self.job.headers = {"request-id": new_request_id()}
        self._asked_tokens = body.max_tokens
        self._has_begun = False
        self._blocks = BlockEvents()

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        [output] = outputs
        deltas = self._conversation.deltas(output.text, is_last=True)
        return self._envelope(output, [_block(delta) for delta in deltas if delta.get("content") != ""])

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        parts = []
        if not self._has_begun:
            self._has_begun = True
            message = {**self._envelope(delta.output, []), **_NO_END}
            parts += [named_event({"type": "message_start", "message": message}), PING]
        is_last = delta.finish_reason is not None
        parts += [self._blocks.delta(new) for new in self._conversation.deltas(delta.text, is_last)]
        if is_last:
            end = {"type": "message_delta", "delta": self._ending(delta.output), "usage": _usage(delta.output)}
            parts += [self._blocks.stop(), named_event(end), named_event({"type": "message_stop"})]
        return b"".join(parts)

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        return b""  # the event of the last delta has them

    def _envelope(self, output: RequestOutput, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.job.id, "type": "message", "role": "assistant", "model": self.job.model}
        return {**head, "content": content, **self._ending(output), "usage": _usage(output)}

    def _ending(self, output: RequestOutput) -> dict[str, Any]:
        return {"stop_reason": self._stop_reason(output), "stop_sequence": output.stop_reason}

    def _stop_reason(self, output: RequestOutput) -> str | None:
        if output.finish_reason is None:
            return None
        if output.stop_reason is not None:
            return "stop_sequence"
        if output.finish_reason == FinishReason.LENGTH:
            is_full = len(output.token_ids) < self._asked_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens"
        return "tool_use" if self._conversation.finish_reason(0, output.finish_reason) == "tool_calls" else "end_turn"


def _block(delta: dict[str, Any]) -> dict[str, Any]:
    """The block for some whole text or a whole call."""
    if "content" in delta:
        return {"type": "text", "text": delta["content"]}
    [call] = delta["tool_calls"]
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": _parsed(function["arguments"])}


def _parsed(arguments: str) -> dict[str, Any]:
    """A call's input. What is no JSON object is kept under the name that Anthropic's documentation gives it."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {"INVALID_JSON": arguments}


def _usage(output: RequestOutput) -> dict[str, int]:
    """So far. As in Anthropic's API, `input_tokens` leaves out what the prefix cache had."""
    return {
        "input_tokens": len(output.prompt_token_ids) - output.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.num_cached_tokens,
        "output_tokens": len(output.token_ids),
    }
