"""Serves a host engine's routes through evenflow's front: streams bytes both ways with backpressure.

A client's disconnect also aborts its request in the host.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, nullcontext, suppress
from dataclasses import dataclass

import httpx
from fastapi import APIRouter, Request, Response
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.types import Receive, Scope, Send

from evenflow.bench.live_load import LoadLimits
from evenflow.core.service_classes import Classes
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.hosts.launch import HostLaunch
from evenflow.server.access import Caller, require_admin
from evenflow.server.api.engine_response import client_disconnected
from evenflow.server.api.formats import failed_stream
from evenflow.server.api.request_body import may_be_large, read_bytes
from evenflow.server.api.service import Service
from evenflow.server.errors import ApiError, as_api_error
from evenflow.server.metrics.observer import FiguresFor, Observer
from evenflow.server.proxy.host_engine import HostEngine
from evenflow.server.proxy.request_settings import check_settings
from evenflow.server.proxy.separation import check_stored_response, keep_apart

_READS = ("GET", "HEAD")
_METHODS = [*_READS, "POST", "PUT", "PATCH", "DELETE"]
# Headers of the connection, not of the request; and evenflow's own key.
_HOP_HEADERS = set(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
_DROPPED_FROM_REQUEST = _HOP_HEADERS | {b"host", b"authorization", b"x-api-key", b"content-length", b"expect"}
# Hosts also have routes that change weights, sleep or run code, and each release adds some. So the routes open to a key
# are listed, and so are those open to a web page, which can send a GET as an image.
_READ_BY_ALL = re.compile(rb"/(v1/models(/[\w-][\w.:-]*)*|v1/responses/[\w.~-]+|openapi\.json)")
_DELETED_BY_ALL = re.compile(rb"/v1/responses/[\w.~-]+")
_POSTED_BY_ALL = re.compile(
    rb"/(v1/(chat/)?completions(/batch|/render|/derender)?"
    rb"|v1/messages(/count_tokens|/render)?"
    rb"|v1/responses(/[\w.~-]+/cancel|/render)?"
    rb"|v1/audio/(transcriptions|translations)"
    rb"|(v1/)?(score|rerank|classify|pooling|tokenize|detokenize)|v1/embeddings|v2/(embed|rerank)|generate)"
)
_HAS_NO_EFFECT = re.compile(
    _READ_BY_ALL.pattern + rb"|/(docs|redoc|ping|version|tokenizer_info|kv_event_sources|is_(sleeping|paused)"
    rb"|weight_info|(get_)?(load|model_info|server_info|weight_version|world_size))"
)
_DROPPED_FROM_RESPONSE = _HOP_HEADERS | {b"server", b"date"}
_LAST_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class HostService(Service):
    """A model served by a host engine."""

    client: HostEngine

    async def load_limits(self) -> LoadLimits:
        """Limits of the live page's load. Only the host counts tokens; they are estimated here."""
        max_model_len = await self.client.max_model_len()
        return LoadLimits(max_model_len=max_model_len, max_requests=self.gate.max_tenant_running)


def proxy_routes(service: HostService, may_be_a_page: bool) -> APIRouter:
    """Proxy every path without an earlier route. Without keys, web pages may send requests."""
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/{path:path}", methods=_METHODS)
    async def proxy(request: Request) -> Response:
        method, path, caller = request.method, request.scope["raw_path"], request.state.caller
        if not _is_for_all(method, path):
            require_admin(caller)
        is_read = method in _READS and _HAS_NO_EFFECT.fullmatch(path) is not None
        if may_be_a_page and method in _READS and not is_read:
            message = f"Got {method} on a path that may have an effect, and a web page can send it: use POST."
            raise ApiError(403, message, code="effect_by_get")
        check_stored_response(request.url.path, caller)
        async with service.large_work.body(caller.client) if may_be_large(request) else nullcontext():
            content = await read_bytes(request, service.gate.limits.max_body_size)
        query = request.scope["query_string"]
        url = service.client.http.base_url.copy_with(raw_path=path + (b"?" + query if query else b""))
        headers = _without(request.headers.raw, _DROPPED_FROM_REQUEST)
        proxied = httpx.Request(method, url, headers=headers, content=content)
        if content and _POSTED_BY_ALL.fullmatch(path) is not None:
            host = service.client.launch_kind
            policy, classes = service.client.policy, service.client.classes
            limits = None if policy is None else policy.target, classes
            proxied = await service.large_work.run(
                len(content), caller.client, _checked, proxied, host, caller, *limits
            )
        return ProxyResponse(service, proxied, caller, is_counted=not is_read)

    return routes


def _checked(
    request: httpx.Request, host: type[HostLaunch], caller: Caller, target: float | None, classes: Classes
) -> httpx.Request:
    check_settings(request.read(), host.settings_paths, caller, target, classes)
    return keep_apart(request, host, caller)


def _is_for_all(method: str, path: bytes) -> bool:
    routes = {"POST": _POSTED_BY_ALL, "DELETE": _DELETED_BY_ALL, "GET": _READ_BY_ALL, "HEAD": _READ_BY_ALL}.get(method)
    return routes is not None and routes.fullmatch(path) is not None


def _without(headers: list[tuple[bytes, bytes]], dropped: set[bytes]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in dropped]


class ProxyResponse(Response):
    """Sends a request to the host and streams its response to the client."""

    def __init__(self, service: HostService, request: httpx.Request, caller: Caller, is_counted: bool) -> None:
        super().__init__()
        self._service = service
        self._request = request
        self._caller = caller
        self._is_counted = is_counted
        self._relay: asyncio.Task[None] | None = None
        self._failure: EvenflowError | None = None
        self._has_started = False
        self._is_event_stream = False
        self._places = ExitStack()  # among the requests that are counted, and those that a dying host ends

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._places:
            if self._is_counted:
                self._places.enter_context(self._service.gate.enter(self._caller.limited_as(""), 1))
            self._places.enter_context(self._service.client.proxying(self.fail))
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
        """End the response with an error visible to the client."""
        if self._relay is not None and not self._relay.done():
            self._failure = failure
            self._relay.cancel()

    async def _run(self, send: Send) -> None:
        try:
            async with aclosing(await self._service.client.http.send(self._request, stream=True)) as response:
                headers = _without(response.headers.raw, _DROPPED_FROM_RESPONSE)
                self._is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
                num_left = int(response.headers.get("content-length", -1))
                self._has_started = True
                await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
                async for part in response.aiter_raw():
                    num_left -= len(part)
                    if num_left == 0 or part.endswith(_LAST_EVENT):
                        self._places.close()  # before its client can send the next request
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except httpx.TransportError:
            self._failure = EngineFailed(f"{self._service.client.name} broke the connection")

    async def _send_failure(self, failure: EvenflowError, send: Send) -> None:
        if not self._has_started:
            raise failure
        if self._is_event_stream:
            path = self._request.url.path
            await send({"type": "http.response.body", "body": failed_stream(as_api_error(failure), path)})
        # Otherwise close the connection early: the only way to mark a partial response as failed.


def metrics_routes(service: HostService, observer: Observer) -> APIRouter:
    """The route /metrics: the host's metrics, and evenflow's where the host has none."""
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
            with suppress(httpx.TransportError):  # the host is going down; evenflow's own metrics show it
                response = await engine.http.get("/metrics", headers={"accept": "text/plain"})
                host_metrics = response.content if response.is_success else b""
        return Response(
            host_metrics + generate_latest(EvenflowFamilies(request.state.caller)), media_type=CONTENT_TYPE_PLAIN_0_0_4
        )

    return routes
