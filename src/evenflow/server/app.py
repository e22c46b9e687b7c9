"""The HTTP application: which routes there are, and who may use which.

Must not know: how the server is started, how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

from evenflow import __version__
from evenflow.server.access import ApiKeys
from evenflow.server.api.errors import add_error_handlers
from evenflow.server.api.openapi import describe_bodies, refusals
from evenflow.server.api.request_models import BODIES
from evenflow.server.api.routes import answer_routes, model_routes, state_routes, target_routes
from evenflow.server.api.service import Served, Service
from evenflow.server.live.feed import LiveFeed
from evenflow.server.live.feed import router as live_router
from evenflow.server.metrics.observer import Observer
from evenflow.server.metrics.observer import router as metrics_router
from evenflow.server.proxy.response import VllmService, metrics_routes, proxy_routes


def make_app(
    service: Service, observer: Observer, feed: LiveFeed, keys: ApiKeys, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """All routes over one engine."""
    app = FastAPI(title="evenflow", version=__version__, docs_url=None, redoc_url=None)
    with_key = _add_common(app, service, feed, keys, allowed_origins)
    for routes in (answer_routes(service), model_routes(service), metrics_router(observer)):
        app.include_router(routes, **with_key)
    describe_bodies(app, BODIES)
    return app


def make_vllm_app(
    service: VllmService, observer: Observer, feed: LiveFeed, keys: ApiKeys, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """evenflow's own routes over vLLM, and vLLM's behind them, its description of itself included."""
    app = FastAPI(openapi_url=None)
    with_key = _add_common(app, service, feed, keys, allowed_origins)
    for routes in (metrics_routes(service, observer), proxy_routes(service)):
        app.include_router(routes, **with_key)
    return app


def _add_common(
    app: FastAPI, service: Served, feed: LiveFeed, keys: ApiKeys, allowed_origins: Sequence[str]
) -> dict[str, Any]:
    """Add what there is over any engine; returns what makes a router ask for a key."""
    add_error_handlers(app)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )

    def check_key(request: Request) -> None:
        request.state.caller = keys.caller(request.headers.get("authorization"))

    dependencies = [Depends(check_key)]
    if keys.are_needed:
        dependencies.append(Depends(HTTPBearer(auto_error=False)))
    with_key: dict[str, Any] = {"dependencies": dependencies, "responses": refusals(401) if keys.are_needed else None}
    app.include_router(state_routes(service))
    app.include_router(target_routes(service), **with_key)
    app.include_router(live_router(feed, feed_dependencies=dependencies))
    return with_key
