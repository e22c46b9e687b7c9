"""Serves a host engine's routes through evenflow's front: streams bytes both ways with backpressure.

A client that disconnects aborts its request in the host too.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass

import httpx
from fastapi import APIRouter, Request, Response
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from evenflow.bench.live_load import LoadLimits
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.server.access import Caller, require_admin
from evenflow.server.api.engine_response import client_disconnected
from evenflow.server.api.request_body import may_be_large, read_bytes
from evenflow.server.api.request_chunks import RecentRequests
from evenflow.server.api.response_writer import failed_stream
from evenflow.server.api.service import Service
from evenflow.server.errors import as_api_error
from evenflow.server.metrics.observer import FiguresFor, Observer
from evenflow.server.proxy.host_engine import HostEngine

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# Headers of one connection, not of the request; and the key, which is evenflow's.
_HOP_HEADERS = set(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_DROPPED_FROM_REQUEST = _HOP_HEADERS | {b"host", b"authorization", b"x-api-key", b"content-length", b"expect"}
_FOR_ALL = re.compile(
    rb"/(v1/(?!(un)?load)[\w-]+(/[\w-][\w.:-]*)*|tokenize|detokenize|generate|score|rerank|classify|pooling|openapi\.json)"
)
_RESPONSE_ID = re.compile(rb'"id" ?: ?"([^"\\]{1,200})"')  # of hosts' responses, whole or streamed
_ID_WITHIN = 300
_DROPPED_FROM_RESPONSE = _HOP_HEADERS | {b"server", b"date"}


@dataclass(frozen=True, slots=True)
class HostService(Service):
    """A model served by a host engine."""

    client: HostEngine

    async def load_limits(self) -> LoadLimits:
        """What the live page's load has to fit in. The host counts tokens, so here they are estimated."""
        max_model_len = await self.client.max_model_len()
        return LoadLimits(max_model_len=max_model_len, max_requests=self.gate.max_tenant_running)


def proxy_routes(service: HostService, recent: RecentRequests) -> APIRouter:
    """Proxies every path that has no route before this one."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/{path:path}", methods=_METHODS)
    async def proxy(request: Request) -> Response:
        if not _FOR_ALL.fullmatch(request.scope["raw_path"]):  # hosts can also be told to change weights or to sleep
            require_admin(request.state.caller)
        async with service.large_work.body(request.state.caller.client) if may_be_large(request) else nullcontext():
            content = await read_bytes(request, service.gate.limits.max_body_bytes)
        query = request.scope["query_string"]
        raw_path = request.scope["raw_path"] + (b"?" + query if query else b"")
        url = service.client.http.base_url.copy_with(raw_path=raw_path)
        headers = _without(request.headers.raw, _DROPPED_FROM_REQUEST)
        proxied = httpx.Request(request.method, url, headers=headers, content=content)
        return ProxyResponse(service, proxied, request.state.caller, recent)

    return routes


def _without(headers: list[tuple[bytes, bytes]], dropped: set[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in dropped]


class ProxyResponse(Response):
    """Sends a request to the host and streams its response to the client."""

    def __init__(self, service: HostService, request: httpx.Request, caller: Caller, recent: RecentRequests) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._caller = caller
        self._recent = recent
        self._relay: asyncio.Task[None] | None = None
        self._failure: EvenflowError | None = None
        self._has_started = False
        self._is_claimed = False
        self._is_event_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gate, is_counted = self._service.gate, self._request.method == "POST"
        with (
            gate.enter(self._caller.limited_as(""), 1) if is_counted else nullcontext(),
            self._service.client.proxying(self.fail),
        ):
            self._relay = asyncio.create_task(self._run(send))
            disconnect = asyncio.create_task(client_disconnected(receive))
            try:
                await asyncio.wait((self._relay, disconnect), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (self._relay, disconnect):
                    task.cancel()
                await asyncio.wait((self._relay, disconnect))
        if not self._relay.cancelled():
            self._relay.result()
        if self._failure is not None:
            await self._send_failure(self._failure, send)

    def fail(self, failure: EvenflowError) -> None:
        """End the response with an error that the client sees."""
        if self._relay is not None and not self._relay.done():
            self._failure = failure
            self._relay.cancel()

    async def _run(self, send: Send) -> None:
        try:
            async with aclosing(await self._service.client.http.send(self._request, stream=True)) as response:
                headers = _without(response.headers.raw, _DROPPED_FROM_RESPONSE)
                self._is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                self._has_started = True
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for part in response.aiter_raw():
                    self._claim(part)
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError:
            self._failure = EngineFailed(f"{self._service.client.name} broke the connection")

    def _claim(self, part: bytes) -> None:
        """Remember whose response this is, by the id that its beginning has."""
        if not self._is_claimed:
            self._is_claimed = True
            if self._caller.name and (found := _RESPONSE_ID.search(part, 0, _ID_WITHIN)) is not None:
                self._recent.claim(found[1].decode(errors="replace"), self._caller)

    async def _send_failure(self, failure: EvenflowError, send: Send) -> None:
        if not self._has_started:
            raise failure
        if self._is_event_stream:
            path = self._request.url.path
            await send({"type": "http.response.body", "body": failed_stream(as_api_error(failure), path)})
        # Otherwise the connection closes early: the only way to mark half a response as failed.


def metrics_routes(service: HostService, observer: Observer) -> APIRouter:
    """The route /metrics: the host's metrics, and those of evenflow's that it does not have."""
    routes = APIRouter()
    engine = service.client

    class EvenflowFamilies(Collector):
        def __init__(self, caller: Caller) -> None:
            self._figures = FiguresFor(observer, caller)

        def collect(self) -> Iterator[Metric]:
            return (family for family in self._figures.collect() if family.name.startswith("evenflow:"))

    @routes.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics(request: Request) -> Response:
        host_metrics = b""
        if engine.is_up:
            with suppress(httpx.TransportError):  # the host is going down, which evenflow's own metrics show
                response = await engine.http.get("/metrics", headers={"accept": "text/plain"})
                host_metrics = response.content if response.is_success else b""
        return Response(
            host_metrics + generate_latest(EvenflowFamilies(request.state.caller)), media_type=CONTENT_TYPE_PLAIN_0_0_4
        )

    return routes
