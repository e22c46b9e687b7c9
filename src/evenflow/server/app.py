"""The HTTP application: which routes there are, and who may use which.

Must not know: how the server is started, how an answer is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Depends, FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.security import HTTPBearer

from evenflow import __version__
from evenflow.server import live, metrics
from evenflow.server.access import ApiKeys
from evenflow.server.api_errors import add_error_handlers
from evenflow.server.live import LiveFeed
from evenflow.server.metrics import Observer
from evenflow.server.routes import answer_routes, model_routes, state_routes
from evenflow.server.service import Service


def make_app(
    service: Service, observer: Observer, feed: LiveFeed, keys: ApiKeys, allowed_origins: Sequence[str] = ()
) -> FastAPI:
    """All routes over one engine."""
    app = FastAPI(title="evenflow", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"], allow_headers=["*"]
        )

    def check_key(request: Request) -> None:
        request.state.caller = keys.caller(request.headers.get("authorization"))

    with_key = [Depends(check_key)]
    if keys.are_needed:
        with_key.append(Depends(HTTPBearer(auto_error=False)))
    app.include_router(state_routes(service))
    app.include_router(answer_routes(service), dependencies=with_key)
    app.include_router(model_routes(service), dependencies=with_key)
    app.include_router(metrics.router(observer), dependencies=with_key)
    app.include_router(live.router(feed, feed_dependencies=with_key))
    app.include_router(live.router(feed, with_key))
    return app
