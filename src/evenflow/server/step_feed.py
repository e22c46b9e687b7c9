"""vLLM's steps, as evenflow's scheduler inside it tells of them, brought to the Observer.

Must not know: how vLLM is started, HTTP.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec

from evenflow.core.request import FinishReason
from evenflow.server.metrics import Observer
from evenflow.vllm.messages import SteeredStep

_MAX_MESSAGE_BYTES = 1 << 20
_MESSAGES_AT_ONCE = 64
_BUFFER_BYTES = 1 << 22

_decode = msgspec.msgpack.Decoder(SteeredStep).decode


class StepFeed:
    """A socket that every engine process of vLLM's sends its steps to. A step that finds no room is lost."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._observer = observer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.setblocking(False)
        self._socket.bind(str(path))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def forget_requests(self) -> None:
        """No request is open: end those whose end was lost or will not be told."""
        observer = self._observer
        for request_id in list(observer.requests):
            observer.on_request_finished(request_id, FinishReason.ABORT, 0, observer.clock())

    def _read(self) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                self._take(_decode(self._socket.recv(_MAX_MESSAGE_BYTES)))
            except BlockingIOError:
                return

    def _take(self, step: SteeredStep) -> None:
        observer = self._observer
        for one in step.arrived:
            if one.request_id not in observer.requests:
                observer.on_request_started(
                    one.request_id,
                    tenant="",
                    num_prompt_tokens=one.num_prompt_tokens,
                    max_tokens=one.max_tokens,
                    now=one.at,
                )
        observer.on_step(step)
        for gone in step.left:
            if gone.request_id in observer.requests:  # else it was forgotten
                # Why it ended shows in vLLM's own metrics.
                observer.on_request_finished(gone.request_id, FinishReason.STOP, gone.num_output_tokens, step.at)
