"""GET /live/load: the page's load, sized for this server and its measured speed."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter, Response

from evenflow.bench.live_load import SEND_S, USUAL_RATE, LoadLimits, make_load
from evenflow.core.report import StepReport
from evenflow.server.errors import ApiError
from evenflow.server.metrics.observer import Listener, Observer

_MAX_CHUNKS = 64  # averaged for the speed
_MIN_CHUNK_TOKENS = 128  # shorter ones take as long as any step
_MAX_SEND_S = 600.0


class PrefillSpeed(Listener):
    """The speed of recent prefill, in tokens per second."""

    def __init__(self, observer: Observer) -> None:
        self._chunks: deque[tuple[int, float]] = deque(maxlen=_MAX_CHUNKS)
        observer.listen(self)

    def on_step(self, report: StepReport) -> None:
        long = (chunk for chunk in report.chunks if chunk.length >= _MIN_CHUNK_TOKENS)
        self._chunks.extend((chunk.length, chunk.seconds) for chunk in long)

    @property
    def tokens_per_s(self) -> float:
        """The mean of recent long chunks; a typical speed if there were none."""
        seconds = sum(seconds for _, seconds in self._chunks)
        return sum(length for length, _ in self._chunks) / seconds if seconds else USUAL_RATE


def load_routes(speed: PrefillSpeed, limits: Callable[[], Awaitable[LoadLimits]]) -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.get("/live/load")
    async def live_load(seconds: str = f"{SEND_S:g}") -> Response:
        send_s, found = _send_seconds(seconds), await limits()
        load = await asyncio.to_thread(make_load, found, speed.tokens_per_s, secrets.token_hex(4), send_s)
        headers = {"Cache-Control": "no-store"}
        return Response(msgspec.json.encode(load), media_type="application/json", headers=headers)

    return routes


def _send_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_SEND_S:
        message = f"Got seconds={text!r} but expected a number above 0, at most {_MAX_SEND_S:g}."
        raise ApiError(400, message, param="seconds")
    return seconds
