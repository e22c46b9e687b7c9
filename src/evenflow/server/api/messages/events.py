"""The events of one streamed message of Anthropic's API: content blocks that start, grow and stop, one at a time."""

from __future__ import annotations

from typing import Any

from evenflow.server.api.formats import named_event
from evenflow.server.api.json_pieces import encode_json

PING = named_event({"type": "ping"})

_EMPTY_TEXT = {"type": "text", "text": ""}


class BlockEvents:
    """Writes the blocks' events. Each method returns the bytes to send."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._call: int | None = None  # the number of the call whose block is open
        self._text_start = b""  # of the events of an open text block: up to the text

    def _text(self, text: str) -> bytes:
        if not text:
            return b""
        opening = b""
        if not self._text_start:
            opening = self.stop() + self._start(_EMPTY_TEXT)
            self._text_start = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"text_delta","text":' % (self._num_blocks - 1)
            )
        return opening + self._text_start + encode_json(text) + b"}}\n\n"

    def delta(self, delta: dict[str, Any]) -> bytes:
        """The events for one of the deltas that `ToolStream.push_in_order` returns."""
        if "content" in delta:
            return self._text(delta["content"])
        [call] = delta["tool_calls"]
        return self._call_piece(call) if call["index"] == self._call else self._new_call(call)

    def stop(self) -> bytes:
        """Stop the open block, if any."""
        if self._call is None and not self._text_start:
            return b""
        self._call, self._text_start = None, b""
        return named_event({"type": "content_block_stop", "index": self._num_blocks - 1})

    def _start(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return named_event({"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block})

    def _new_call(self, call: dict[str, Any]) -> bytes:
        block = {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}
        opening = self.stop() + self._start(block)
        self._call = call["index"]
        return opening + self._call_piece(call)

    def _call_piece(self, call: dict[str, Any]) -> bytes:
        piece = call["function"]["arguments"]
        if not piece:
            return b""
        delta = {"type": "input_json_delta", "partial_json": piece}
        return named_event({"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta})
