"""Keeps /openapi.json complete: every body, response and error.

Bodies are parsed by hand, so the framework does not know them by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.response_models import ErrorBody

_REFERENCE = "#/components/schemas/{model}"
_BODY_ERRORS = (400, 413, 415)


def described(
    response: type[BaseModel],
    *,
    body: type[BaseModel] | None = None,
    errors: tuple[int, ...] = (),
    streams: bool = False,
    error_body: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Arguments for a route's decorator."""
    success: dict[str, Any] = {"model": response}
    if streams:
        success["content"] = {"text/event-stream": {}}  # this version of OpenAPI cannot describe events
    statuses = {*errors, *(_BODY_ERRORS if body is not None else ())}
    arguments: dict[str, Any] = {"responses": {200: success, **error_responses(*sorted(statuses), body=error_body)}}
    if body is not None:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=body.__name__)}}}
        arguments["openapi_extra"] = {"requestBody": {"required": True, "content": content}}
    return arguments


def error_responses(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": body} for status in statuses}


def add_openapi(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add /openapi.json, with the schemas that `described` refers to.

    It is made once, on a thread, because it is long and anyone may ask for it.
    """
    making, made = threading.Lock(), list[bytes]()

    def document() -> dict[str, Any]:
        with making:
            if app.openapi_schema is None:
                app.openapi_schema = make()
            return app.openapi_schema

    def make() -> dict[str, Any]:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # the framework's own, never sent
        _, body_schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFERENCE)
        components = schema["components"]["schemas"]
        components |= body_schemas["$defs"]
        for unused in ("HTTPValidationError", "ValidationError"):
            components.pop(unused, None)
        return schema

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        if not made:
            made.append(encode_json(await asyncio.to_thread(document)))
        return Response(made[0], media_type="application/json")

    app.openapi = document  # type: ignore[method-assign]
