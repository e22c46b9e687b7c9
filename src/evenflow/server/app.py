"""The HTTP application: its routes, and which of them need an API key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import APIKeyHeader, HTTPBearer

from evenflow import __version__
from evenflow.server.access import ApiKeys, check_role
from evenflow.server.api.embeddings import EmbeddingsBody
from evenflow.server.api.messages.request import MESSAGES_BODIES
from evenflow.server.api.messages.routes import messages_routes
from evenflow.server.api.ollama.routes import ollama_routes
from evenflow.server.api.openapi import add_openapi, error_responses
from evenflow.server.api.request_chunks import RecentRequests, request_routes
from evenflow.server.api.request_models import BODIES
from evenflow.server.api.responses.request import ResponsesBody
from evenflow.server.api.responses.routes import responses_routes
from evenflow.server.api.routes import generation_routes, health_routes, model_routes, target_routes
from evenflow.server.api.service import ModelService
from evenflow.server.browser_guard import BrowserGuard
from evenflow.server.errors import add_error_handlers
from evenflow.server.live.feed import LiveFeed
from evenflow.server.live.feed import router as live_router
from evenflow.server.live.load import PrefillSpeed, load_routes
from evenflow.server.metrics.observer import Observer
from evenflow.server.metrics.observer import router as metrics_router
from evenflow.server.proxy.response import HostService, metrics_routes, proxy_routes


def make_app(
    service: ModelService | HostService,
    observer: Observer,
    feed: LiveFeed,
    keys: ApiKeys,
    allowed_hosts: Sequence[str] = (),
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """evenflow's own routes, then the engine's: evenflow's API, or everything that the host serves."""
    recent = RecentRequests(observer)
    if isinstance(service, ModelService):
        app = FastAPI(title="evenflow", version=__version__, openapi_url=None)
        add_openapi(app, (*BODIES, EmbeddingsBody, *MESSAGES_BODIES, ResponsesBody))
        messages = messages_routes(service, needs_key=keys.are_needed)
        ollama = ollama_routes(service)
        model = [generation_routes(service), responses_routes(service), messages, ollama, model_routes(service)]
        engine_routes = [*model, metrics_router(observer)]
    else:
        app = FastAPI(openapi_url=None)  # the host's is proxied
        engine_routes = [metrics_routes(service, observer), proxy_routes(service, may_be_a_page=not keys.are_needed)]
    add_error_handlers(app)
    app.router.redirect_slashes = False  # it would redirect to any host that a client names
    if allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])

    if not keys.are_needed:
        app.add_middleware(BrowserGuard, hosts=allowed_hosts, origins=allowed_origins)

    async def check_key(request: Request) -> None:
        address = request.client.host if request.client is not None else ""
        headers = request.headers
        request.state.caller = keys.check(headers.get("authorization"), address, headers.get("x-api-key"))
        check_role(request.state.caller, request.scope["path"])

    with_key: dict[str, Any] = {"dependencies": [Depends(check_key)]}
    if keys.are_needed:
        schemes = (HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False))
        with_key["dependencies"] += [Depends(scheme) for scheme in schemes]
        with_key["responses"] = error_responses(401)
    app.include_router(health_routes(service))
    app.include_router(live_router(feed, feed_dependencies=with_key["dependencies"]))
    load = load_routes(PrefillSpeed(observer), service.load_limits)
    for routes in (load, target_routes(service), request_routes(recent), *engine_routes):
        app.include_router(routes, **with_key)
    return app
