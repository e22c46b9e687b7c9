"""Receives the step reports of a host engine and passes them to the Observer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain

import msgspec

from evenflow.core.report import StepReport
from evenflow.core.request import FinishReason
from evenflow.framing import FrameReader
from evenflow.hosts.messages import HostStep
from evenflow.server.metrics.observer import Observer, RequestRecord

_decode = msgspec.msgpack.Decoder(HostStep).decode


class StepReceiver(asyncio.Protocol):
    """The connection to one of the host's engine processes. Requests that arrive before `is_serving` are not observed:
    they warm the engine up.
    """

    def __init__(self, observer: Observer, is_serving: Callable[[], bool]) -> None:
        self._observer = observer
        self._is_serving = is_serving
        self._unobserved: set[str] = set()
        self._frames = FrameReader()

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self._observe(_decode(content))

    def _observe(self, step: HostStep) -> None:
        observer = self._observer
        is_serving = self._is_serving()
        for new in step.arrived:
            if not is_serving:
                self._unobserved.add(new.request_id)
            elif new.request_id not in observer.requests:
                sizes = new.num_prompt_tokens, new.max_tokens
                observer.on_request_started(RequestRecord(new.request_id, "", *sizes, started_at=new.at))
        if not self._is_unobserved(step.report):
            observer.on_step(step.report)
        for left in step.left:
            self._unobserved.discard(left.request_id)
            if left.request_id in observer.requests:  # else it was forgotten
                # Why it ended shows in the host's own metrics.
                observer.on_request_finished(left.request_id, FinishReason.STOP, left.num_output_tokens, step.report.at)

    def _is_unobserved(self, report: StepReport) -> bool:
        chunk_ids = (chunk.request_id for chunk in report.chunks)
        return bool(self._unobserved) and self._unobserved.issuperset(chain(report.ids, chunk_ids))
