"""Receives the step reports of a host engine and passes them to the Observer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec

from evenflow.core.request import FinishReason
from evenflow.framing import FrameReader
from evenflow.hosts.messages import HostStep
from evenflow.server.metrics.observer import Observer

_decode = msgspec.msgpack.Decoder(HostStep).decode


class StepFeed:
    """A socket that every engine process of the host connects to."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._server: asyncio.Server | None = None

    async def listen(self, path: Path) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Link(self._take), path)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    def forget_requests(self) -> None:
        """No request is open: end those whose end was lost or will not be reported."""
        observer = self._observer
        for request_id in list(observer.requests):
            observer.on_request_finished(request_id, FinishReason.ABORT, 0, observer.clock())

    def _take(self, step: HostStep) -> None:
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
        observer.on_step(step.report)
        for gone in step.left:
            if gone.request_id in observer.requests:  # else it was forgotten
                # Why it ended shows in vLLM's own metrics.
                observer.on_request_finished(gone.request_id, FinishReason.STOP, gone.num_output_tokens, step.report.at)


class _Link(asyncio.Protocol):
    """The connection of one engine process."""

    def __init__(self, take: Callable[[HostStep], None]) -> None:
        self._take = take
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self._take(_decode(content))
