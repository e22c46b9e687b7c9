"""The output items of one response, and the events that report their growth.

It takes the deltas of a chat. Must not know: requests, the engine, how events are sent.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

Event = dict[str, Any]


class OutputItems:
    """Messages and calls, in the order in which the model wrote them; the last one is open until it ends."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False  # the last of them
        self._call_index = -1  # in the chat's deltas, of the last call
        self._pieces: list[str] = []  # of the open item's text or arguments
        self._logprobs: list[object] = []  # of the open item
        self._num_sent_logprobs = 0

    def add(self, delta: dict[str, Any], logprobs: Sequence[object] = ()) -> Iterator[Event]:
        """Take one delta of a chat."""
        self._logprobs += logprobs
        if text := delta.get("content"):
            yield from self._add_text(text)
        for call in delta.get("tool_calls", ()):
            yield from self._add_call(call)

    def end(self, *, is_complete: bool) -> Iterator[Event]:
        """End the last item. Without any output there is one empty message."""
        if not self.items:
            yield from self._open_message()
        yield from self._close("completed" if is_complete else "incomplete")

    def _add_text(self, text: str) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != "message":
            yield from self._open_message()
        self._pieces.append(text)
        new_logprobs = self._logprobs[self._num_sent_logprobs :]
        self._num_sent_logprobs = len(self._logprobs)
        yield {"type": "response.output_text.delta", **self._part_place(), "delta": text, "logprobs": new_logprobs}

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        if call["index"] != self._call_index:
            self._call_index = call["index"]
            yield from self._open(
                {
                    "id": f"fc_{secrets.token_hex(12)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": call["id"],
                    "name": call["function"]["name"],
                    "arguments": "",
                }
            )
        if arguments := call["function"]["arguments"]:
            self._pieces.append(arguments)
            yield {"type": "response.function_call_arguments.delta", **self._place(), "delta": arguments}

    def _open_message(self) -> Iterator[Event]:
        item_id = f"msg_{secrets.token_hex(12)}"
        item = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        yield from self._open(item)
        yield {"type": "response.content_part.added", **self._part_place(), "part": _text_part("", [])}

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        self.items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        if item["type"] == "message":
            part = _text_part(text, self._logprobs)
            item["content"] = [part]
            done = {"text": text, "logprobs": self._logprobs}
            yield {"type": "response.output_text.done", **self._part_place(), **done}
            yield {"type": "response.content_part.done", **self._part_place(), "part": part}
        else:
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield {"type": "response.function_call_arguments.done", **self._place(), **done}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
        self._is_open, self._pieces, self._logprobs, self._num_sent_logprobs = False, [], [], 0

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part_place(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


def _text_part(text: str, logprobs: list[object]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
