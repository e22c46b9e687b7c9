"""Makes /openapi.json say what is true: every body, every answer, every way to be refused.

Bodies are read by hand, so the framework must be told of them. Must not know: what a route does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from evenflow.server.api.errors import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_BODY_ERRORS = (400, 413, 415)


def described(
    answer: type[BaseModel], *, body: type[BaseModel] | None = None, errors: tuple[int, ...] = (), streams: bool = False
) -> dict[str, Any]:
    """What a route's decorator is told."""
    good: dict[str, Any] = {"model": answer}
    if streams:
        good["content"] = {"text/event-stream": {}}  # this version of OpenAPI has no words for events
    statuses = {*errors, *(_BODY_ERRORS if body is not None else ())}
    told: dict[str, Any] = {"responses": {200: good, **refusals(*sorted(statuses))}}
    if body is not None:
        schema = {"$ref": _REFERENCE.format(model=body.__name__)}
        content = {"application/json": {"schema": schema}}
        told["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return told


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ErrorBody} for status in statuses}


def describe_bodies(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Let the document of this application hold the schemas of the bodies that its routes refer to."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, routes=app.routes)
            for path in made["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)  # the framework's own, which is never given
            _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
            components = made["components"]["schemas"]
            components |= schemas["$defs"]
            for unused in ("HTTPValidationError", "ValidationError"):
                components.pop(unused, None)
            app.openapi_schema = made
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
