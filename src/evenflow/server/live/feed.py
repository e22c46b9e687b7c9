"""The live page's files, and its feed of steps and figures.

The feed is server-sent events, ten batches a second, as columns. Slow readers miss steps.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from evenflow.core.report import Stall, StepReport
from evenflow.server.access import Caller
from evenflow.server.metrics.by_class import busiest
from evenflow.server.metrics.observer import Listener, Observer, ServedRequest

MAX_READERS = 64
MAX_OWN_READERS = 8  # per client: a key or an address
BATCH_S = 0.1
_BATCHES_PER_FIGURES = 5
_MAX_STEPS = 4096  # kept for readers: twenty seconds of the fastest engine
_STEPS_AT_ONCE = 512  # per message
_TBT_WINDOW_S = 5
_TTFT_WINDOW_S = 30  # longer, because first tokens are far fewer
_HIT_RATE_WINDOW_S = 60
_STALL_WINDOW_S = 300
_NUM_WORST_STALLS = 6
_NUM_TENANTS = 8  # shown: those with the most open requests

_FOLDER = Path(__file__).parent / "dashboard"
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class StepRow(NamedTuple):
    """A step for the page. Requests are numbered: numbers are short and reveal nothing."""

    step: int
    at: float
    seconds: float
    predicted: float
    decode_seconds: float
    decodes: int
    tokens: int  # sent to streams
    budget: int
    target: float | None
    late: int
    chunks: Sequence[tuple[int, int, int, str, float]]  # request, start, length, reason, seconds


class LiveFeed(Listener):
    """The last steps and the worst stalls, for all readers of the page."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._rows: deque[StepRow] = deque(maxlen=_MAX_STEPS)
        self._num_steps = 0  # since the start
        self._numbers: dict[str, int] = {}
        self._next_numbers = count(1)
        self._lookups: deque[tuple[float, int, int]] = deque(maxlen=_MAX_STEPS)  # time, tokens, cached tokens
        self._stalls: list[dict[str, Any]] = []  # worst first
        self._readers: Counter[str] = Counter()  # by client
        self._is_closed = False
        observer.listen(self)

    @property
    def num_readers(self) -> int:
        return self._readers.total()

    def close(self) -> None:
        """End all feeds: an open one would delay the server's shutdown."""
        self._is_closed = True

    # ---- called by the observer ----

    def on_step(self, report: StepReport) -> None:
        for admission in report.admissions:
            self._lookups.append((report.at, admission.num_tokens, admission.num_cached_tokens))
        if (stall := report.stall) is not None:
            self._add_stall(report, stall)
        self._rows.append(self._row(report))
        self._num_steps += 1

    def on_request_finished(self, record: ServedRequest) -> None:
        self._numbers.pop(record.request_id, None)

    def _number(self, request_id: str) -> int:
        if request_id not in self._numbers and request_id in self._observer.requests:
            self._numbers[request_id] = next(self._next_numbers)
        return self._numbers.get(request_id, 0)

    def _row(self, report: StepReport) -> StepRow:
        return StepRow(
            step=report.step_id,
            at=report.at,
            seconds=report.seconds,
            predicted=report.predicted_seconds,
            decode_seconds=report.decode_seconds,
            decodes=report.num_decodes,
            tokens=report.num_output_tokens,
            budget=report.budget,
            target=report.target_s,
            late=len(report.late),
            chunks=[
                (self._number(chunk.request_id), chunk.start, chunk.length, chunk.reason, chunk.seconds)
                for chunk in report.chunks
            ],
        )

    def _add_stall(self, report: StepReport, stall: Stall) -> None:
        entry = {
            "at": report.at,
            "step": report.step_id,
            "request": self._number(stall.request_id),
            "id": stall.request_id,
            "key": record.key if (record := self._observer.requests.get(stall.request_id)) is not None else "",
            "gap": stall.gap_s,
            "late": stall.late_s,
            "streams": len(report.late),
            "causes": [
                (cause.kind, cause.seconds, self._number(cause.request_id) if cause.request_id else 0, cause.num_tokens)
                for cause in stall.causes
            ],
        }
        recent = [one for one in self._stalls if one["at"] > report.at - _STALL_WINDOW_S]
        self._stalls = sorted([*recent, entry], key=lambda one: -one["gap"])[:_NUM_WORST_STALLS]

    # ---- sent to the page ----

    async def stream(self, caller: Caller | None = None) -> AsyncIterator[bytes]:
        """One reader's feed: the model, then steps and figures until one side disconnects.

        A caller sees its own key's tenants and request ids; an admin all of them.
        """
        client = "" if caller is None else caller.client
        if self.num_readers >= MAX_READERS or self._readers[client] >= MAX_OWN_READERS:
            yield _message("full", {"max_readers": min(MAX_READERS, MAX_OWN_READERS)})
            return
        self._readers[client] += 1
        try:
            yield _message("hello", {"model": self._observer.loaded_model})
            num_sent = max(0, self._num_steps - _STEPS_AT_ONCE)
            for batch in count():
                if self._is_closed:
                    return
                num_new, num_sent = self._num_steps - num_sent, self._num_steps
                if num_new:
                    yield _message("steps", self._columns(num_new))
                if batch % _BATCHES_PER_FIGURES == 0:
                    yield _message("figures", self._figures(caller))
                await asyncio.sleep(BATCH_S)
        finally:
            self._readers[client] -= 1
            if not self._readers[client]:
                del self._readers[client]

    def _columns(self, num_steps: int) -> dict[str, Any]:
        """The last steps, at most one message's worth, as columns, which is how the page stores them."""
        num_kept = min(num_steps, len(self._rows), _STEPS_AT_ONCE)
        rows = islice(self._rows, len(self._rows) - num_kept, None)
        columns = zip(*rows, strict=True)
        return {**dict(zip(StepRow._fields, columns, strict=True)), "now": self._observer.clock()}

    def _figures(self, caller: Caller | None) -> dict[str, Any]:
        observer, now = self._observer, self._observer.clock()
        report = observer.last_report
        tbt = observer.recent_tbt.quantiles((0.5, 0.99), now, _TBT_WINDOW_S)
        ttft = observer.recent_ttft.quantiles((0.5, 0.99), now, _TTFT_WINDOW_S)
        lookups = [(tokens, cached) for at, tokens, cached in self._lookups if at > now - _HIT_RATE_WINDOW_S]
        looked_up = sum(tokens for tokens, _ in lookups)
        return {
            "now": now,
            "up": observer.engine_state.is_up,
            "restarts": observer.engine_state.num_restarts,
            "policy": observer.policy,
            "target": observer.target_s,
            "feasible": report.feasible_target_s if report is not None else None,
            "tbt": tbt,
            "ttft": ttft,
            "running": report.num_running if report is not None else 0,
            "waiting": report.num_waiting if report is not None else 0,
            "kv": report.kv_cache_usage if report is not None else 0.0,
            "classes": list(observer.classes.rows(now, _TBT_WINDOW_S, _TTFT_WINDOW_S)),
            "hits": sum(cached for _, cached in lookups) / looked_up if looked_up else None,
            "stalls": [_seen_by(caller, stall) for stall in self._stalls if stall["at"] > now - _STALL_WINDOW_S],
            "tenants": self._tenants(caller),
        }

    def _tenants(self, caller: Caller | None) -> list[dict[str, Any]]:
        if caller is None:
            return []
        records = self._observer.requests.values()
        seen = [one for one in records if caller.is_admin or one.key == caller.name]
        named = [("/".join(filter(None, (one.key, one.tenant))), one.admitted_at is not None) for one in seen]
        return busiest([(name, has_begun) for name, has_begun in named if name], _NUM_TENANTS)


def _seen_by(caller: Caller | None, stall: dict[str, Any]) -> dict[str, Any]:
    """Request ids are visible to their own key only: clients may choose them."""
    is_own = caller is not None and (caller.is_admin or caller.name == stall["key"])
    return {name: value for name, value in stall.items() if name != "key" and (is_own or name != "id")}


def _message(event: str, data: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), msgspec.json.encode(data))


def router(feed: LiveFeed, feed_dependencies: Sequence[Any] = ()) -> APIRouter:
    """The page at / and its files, open to all; its feed, guarded by these dependencies (`Depends(...)`)."""
    routes = APIRouter(include_in_schema=False)
    files = {path.name: (path.read_bytes(), _MEDIA_TYPES[path.suffix]) for path in _FOLDER.iterdir()}

    @routes.get("/")
    @routes.get("/live/{name}.{suffix}")
    async def file(request: Request) -> Response:
        name = "{name}.{suffix}".format(**request.path_params) if request.path_params else "index.html"
        if name not in files:
            raise HTTPException(404, f"The page has no file {name!r}.")
        content, media_type = files[name]
        return Response(content, media_type=media_type, headers=_HEADERS)

    @routes.get("/live/feed", dependencies=list(feed_dependencies))
    async def live_feed(request: Request) -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        caller = getattr(request.state, "caller", None)
        return StreamingResponse(feed.stream(caller), media_type="text/event-stream", headers=headers)

    return routes
