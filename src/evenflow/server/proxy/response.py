"""vLLM's routes through evenflow's front: bytes both ways, as fast as the slower side takes them.

A client that goes away ends its request in vLLM too. Must not know: what a request asks for, how vLLM is started.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import httpx
import msgspec
from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from evenflow.errors import EngineFailed, EvenflowError
from evenflow.server.access import Caller, Gate, ServerLimits
from evenflow.server.api.errors import as_api_error
from evenflow.server.api.generation_response import DONE, event_of
from evenflow.server.api.request_body import read_bytes
from evenflow.server.metrics.observer import Observer
from evenflow.server.proxy.vllm_engine import VllmEngine

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_URL = httpx.URL("http://vllm")
# What concerns one connection, not the request; and the key, which is evenflow's.
_HOP_HEADERS = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer"),
    *(b"transfer-encoding", b"upgrade"),
}
_REQUEST_ONLY_HERE = _HOP_HEADERS | {b"host", b"authorization", b"content-length", b"expect"}
_RESPONSE_ONLY_HERE = _HOP_HEADERS | {b"server", b"date"}

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class VllmService:
    """vLLM behind one server."""

    client: VllmEngine
    gate: Gate
    limits: ServerLimits


def proxy_routes(service: VllmService) -> APIRouter:
    """Everything that is not evenflow's own; include it last."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/{path:path}", methods=_METHODS)
    async def proxy(request: Request) -> Response:
        content = await read_bytes(request, service.limits.max_body_bytes)
        query = request.scope["query_string"]
        url = _URL.copy_with(raw_path=request.scope["raw_path"] + (b"?" + query if query else b""))
        headers = _without(request.headers.raw, _REQUEST_ONLY_HERE)
        caller: Caller = request.state.caller
        asked = httpx.Request(request.method, url, headers=headers, content=content)
        return Relaying(service, asked, caller.tenant(None))

    return routes


def _without(headers: Headers, left_out: set[bytes]) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in left_out]


class Relaying(Response):
    """One request on its way through vLLM, from the gate to its last byte."""

    def __init__(self, service: VllmService, request: httpx.Request, tenant: str) -> None:
        super().__init__()
        self._engine = service.client
        self._gate = service.gate
        self._request = request
        self._tenant = tenant
        self._relay: asyncio.Task[None] | None = None
        self._failure: EvenflowError | None = None
        self._has_begun = False  # to answer
        self._is_event_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        makes_work = self._request.method == "POST"
        with self._gate.enter(self._tenant, 1) if makes_work else nullcontext(), self._engine.proxying(self):
            self._relay = asyncio.create_task(self._run(send))
            leaving = asyncio.create_task(_client_left(receive))
            try:
                await asyncio.wait((self._relay, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (self._relay, leaving):
                    task.cancel()
                await asyncio.wait((self._relay, leaving))
        if not self._relay.cancelled():
            self._relay.result()
        if self._failure is not None:
            await self._end_with(self._failure, send)

    def fail(self, failure: EvenflowError) -> None:
        """End it by an error that the client gets to see."""
        if self._relay is not None and not self._relay.done():
            self._failure = failure
            self._relay.cancel()

    async def _run(self, send: Send) -> None:
        try:
            response = await self._engine.http.send(self._request, stream=True)
            try:
                headers = _without(response.headers.raw, _RESPONSE_ONLY_HERE)
                self._is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                self._has_begun = True
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for part in response.aiter_raw():
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            finally:
                await response.aclose()
        except httpx.TransportError:
            self._failure = EngineFailed("vLLM broke the connection")

    async def _end_with(self, failure: EvenflowError, send: Send) -> None:
        if not self._has_begun:
            raise failure
        if self._is_event_stream:
            error = event_of(msgspec.json.encode(as_api_error(failure).body()))
            await send({"type": "http.response.body", "body": error + DONE})
        # Else the connection is closed before the end, which is all that can be said of half an answer.


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EvenflowFamilies(Collector):
    """What vLLM has no figures of; those called as vLLM's are vLLM's own to tell."""

    def __init__(self, collectors: CollectorRegistry) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        return (family for family in self._collectors.collect() if family.name.startswith("evenflow:"))


def metrics_routes(service: VllmService, observer: Observer) -> APIRouter:
    """The route /metrics: vLLM's own figures and evenflow's."""
    routes = APIRouter()
    engine, own = service.client, _EvenflowFamilies(observer.collectors)

    @routes.get("/metrics", response_class=Response, summary="Figures for Prometheus")
    async def metrics() -> Response:
        theirs = b""
        if engine.is_up:
            try:
                response = await engine.http.get("/metrics", headers={"accept": "text/plain"})
                theirs = response.content if response.is_success else b""
            except httpx.TransportError:
                pass  # it is going down: evenflow's own figures say so
        return Response(theirs + generate_latest(own), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return routes
