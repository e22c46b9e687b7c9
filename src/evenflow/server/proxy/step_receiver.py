"""Receives the step reports of a host engine and passes them to the Observer."""

from __future__ import annotations

import asyncio
from itertools import chain

import msgspec

from evenflow.core.request import FinishReason
from evenflow.framing import FrameReader
from evenflow.hosts.messages import HostStep
from evenflow.server.metrics.observer import Observer, ServedRequest
from evenflow.server.proxy import warm_up
from evenflow.server.proxy.separation import owner_of

_decode = msgspec.msgpack.Decoder(HostStep).decode


class StepReceiver(asyncio.Protocol):
    """The connection to one of the host's engine processes. Requests of the warm-up are not observed."""

    def __init__(self, observer: Observer, has_keys: bool) -> None:
        self._observer = observer
        self._has_keys = has_keys  # else clients choose ids
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self._observe(_decode(content))

    def _observe(self, step: HostStep) -> None:
        observer = self._observer
        for new in step.arrived:
            if not (_is_of_warm_up(new.request_id) or new.request_id in observer.requests):
                sizes = new.num_prompt_tokens, new.max_tokens
                key = owner_of(new.request_id) if self._has_keys else ""
                observer.on_request_started(ServedRequest(new.request_id, "", *sizes, started_at=new.at, key=key))
        chunk_ids = (chunk.request_id for chunk in step.report.chunks)
        if not all(map(_is_of_warm_up, chain(step.report.ids, chunk_ids))):
            observer.on_step(step.report)
        for left in step.left:
            if left.request_id in observer.requests:  # else it was already ended here
                # The host's own metrics show the reason of its end.
                observer.on_request_finished(left.request_id, FinishReason.STOP, left.num_output_tokens, step.report.at)


def _is_of_warm_up(request_id: str) -> bool:
    return warm_up.REQUEST_ID in request_id and not owner_of(request_id)
