"""Every refusal and failure as clients of OpenAI's API know them: one shape, the right status, when to come back.

Must not know: routes.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from evenflow.errors import EngineFailed, EvenflowError, InvalidInput

logger = logging.getLogger("evenflow")

_MOST_MESSAGE_CHARACTERS = 1000
RETRY_AFTER_S = 1

_DURATIONS = ("tbt_target", "ttft_target")
_UNSUPPORTED = {
    "priority": "requests have no priorities yet; leave it out",
    "logit_bias": "biases are not supported; leave it out",
    "best_of": "only as many answers as are returned can be made; leave it out",
    "suffix": "text cannot be filled in before a suffix; leave it out",
}


class ErrorDetail(BaseModel):
    """What went wrong, in the words of OpenAI's API."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every answer whose status is 400 or more."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail


class ApiError(Exception):
    """A request that gets no answer but this."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        message = str(self)
        if len(message) > _MOST_MESSAGE_CHARACTERS:
            message = message[:_MOST_MESSAGE_CHARACTERS] + "…"
        # A message may quote what was sent, and JSON can carry halves of characters that UTF-8 cannot.
        message = message.encode(errors="replace").decode()
        return {"error": {"message": message, "type": self.kind, "param": self.param, "code": self.code}}


def overloaded(message: str, status: int = 503) -> ApiError:
    """Too much is asked at this moment: come back later."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, message, kind=kind, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def as_api_error(error: EvenflowError) -> ApiError:
    """An error of the engine's side."""
    if isinstance(error, InvalidInput):
        return ApiError(400, str(error))
    if isinstance(error, EngineFailed):
        return overloaded(f"The engine cannot answer now: {error}.")
    return ApiError(500, str(error), kind="server_error")


def invalid_body(error: ValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    found = error.errors(include_url=False, include_context=False)
    # Of a field that may be this or that there is an error for each: the one that does not stop at the type says more.
    about_one_field = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = min(about_one_field, key=lambda one: one["type"].endswith("_type"))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['msg']}.")
    # Behind the first, what is no name of a field is pydantic's name of a type.
    names = [str(part) for at, part in enumerate(first["loc"]) if not at or str(part).replace("_", "a").isalnum()]
    field = names[0] if names else None
    if field in _UNSUPPORTED:
        return ApiError(400, f"{field}: {_UNSUPPORTED[field]}.", param=field, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field: {'.'.join(names)}.", param=field, code="unknown_parameter")
    is_no_duration = first["type"] == "string_pattern_mismatch" and field in _DURATIONS
    what = "expected seconds, or a duration such as 50ms" if is_no_duration else first["msg"]
    return ApiError(400, ": ".join(filter(None, [".".join(names), what])) + ".", param=field)


def respond(error: ApiError) -> Response:
    return Response(msgspec.json.encode(error.body()), error.status, error.headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Give every error its answer, those of the framework included."""

    @app.exception_handler(ApiError)
    async def on_api_error(request: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(EvenflowError)
    async def on_evenflow_error(request: Request, error: EvenflowError) -> Response:
        return respond(as_api_error(error))

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}."
        headers = dict(error.headers or {})
        if error.status_code == 405 and (methods := app.openapi()["paths"].get(request.url.path)):
            headers["Allow"] = ", ".join(method.upper() for method in methods)  # the framework names one route's
        return respond(ApiError(error.status_code, message, headers=headers))

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return respond(ApiError(400, "The body did not come whole."))  # nobody is there to read it

    @app.exception_handler(Exception)
    async def on_defect(request: Request, error: Exception) -> Response:
        return respond(ApiError(500, "The server made a mistake; its log says more.", kind="server_error"))
