"""Every refusal and failure in its API's shape, with the right status and, if it helps, when to retry."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from evenflow.errors import DeadlineExceeded, EngineFailed, EvenflowError, InvalidInput, LateRequest
from evenflow.server.error_shapes import anthropic_error, is_anthropic, is_ollama, new_request_id

_MAX_MESSAGE_CHARACTERS = 1000
_MAX_VALUE_CHARACTERS = 100
_MAX_PROBLEMS = 256
_RETRY_AFTER_S = 1

UNSUPPORTED = "unsupported_parameter"  # a field of OpenAI's API that is refused by name

_UNSUPPORTED = {
    "mcp_servers": "this server calls no other; leave it out, and let the client offer the tools",
    "container": "this server runs no containers; leave it out",
    "audio": "answers are text; leave it out",
    "web_search_options": "this server does not search the web; leave it out, or offer a tool",
    "moderation": "this server does not moderate; leave it out",
    "functions": "this old field is not supported; use tools",
    "function_call": "this old field is not supported; use tool_choice",
    "chat_template": "a request cannot bring its own template; leave it out",
    "use_beam_search": "there is no beam search; leave it out (/v1/completions, not streamed, has best_of)",
    "guided_decoding_backend": "there is one backend; leave it out",
}


@dataclass(eq=False)
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    _: KW_ONLY
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)  # beside the message, where the API allows it

    def __str__(self) -> str:
        return self.message

    def body(self, path: str) -> dict[str, Any]:
        """In the shape of the API that this path belongs to."""
        message = self.message
        if len(message) > _MAX_MESSAGE_CHARACTERS:
            message = message[:_MAX_MESSAGE_CHARACTERS] + "…"
        # A message may quote the request, and JSON can carry lone surrogates, which UTF-8 cannot.
        message = message.encode(errors="replace").decode()
        if is_anthropic(path):
            return anthropic_error(self.status, message, self.code, new_request_id())
        if is_ollama(path):
            return {"error": message}
        error = {"message": message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.figures}

    def response(self, path: str) -> Response:
        body = self.body(path)
        headers = {"request-id": body["request_id"]} if is_anthropic(path) else {}
        return Response(msgspec.json.encode(body), self.status, self.headers | headers, "application/json")


def overloaded(message: str, status: int = 503) -> ApiError:
    """The server has no capacity at the moment: retry later."""
    code = "rate_limit_exceeded" if status == 429 else "overloaded"
    kind = "rate_limit_error" if status == 429 else "server_error"
    return ApiError(status, message, kind=kind, code=code, headers={"Retry-After": str(_RETRY_AFTER_S)})


def as_api_error(error: EvenflowError | ApiError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LateRequest):
        refusal = overloaded(str(error), status=429)
        refusal.headers["Retry-After"] = str(max(_RETRY_AFTER_S, math.ceil(error.retry_after_s)))
        limit = "deadline_s" if error.is_deadline else "ttft_target_s"
        refusal.figures = {"expected_ttft_s": round(error.expected_s, 3), limit: error.target_s}
        return refusal
    if isinstance(error, DeadlineExceeded):
        # OpenAI's clients retry a 504 unless they are told not to, and here nobody waits any more.
        headers, figures = {"x-should-retry": "false"}, {"deadline_s": error.deadline_s}
        about = {"kind": "server_error", "code": "deadline_exceeded"}
        return ApiError(504, str(error), headers=headers, figures=figures, **about)
    if isinstance(error, InvalidInput):
        return ApiError(400, str(error))
    if isinstance(error, EngineFailed):
        return overloaded(f"The engine cannot respond now: {error}.")
    return ApiError(500, str(error), kind="server_error")


def invalid_body(error: ValidationError) -> ApiError:
    """The first problem of a body."""
    if error.error_count() > _MAX_PROBLEMS:  # listing them would take longer than finding them
        return ApiError(400, f"The body has {error.error_count()} wrong or unknown fields.")
    found = error.errors(include_url=False, include_context=False)
    # A field of several types has an error for each: one that is not about the type says more.
    about_one_field = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    first = min(about_one_field, key=lambda one: (one["type"].endswith("_type"), -len(one["loc"])))
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not JSON: {first['msg']}.")
    # After the first part, what is not a field's name is pydantic's name of a type.
    names = [part for at, part in enumerate(first["loc"]) if not at or str(part).replace("_", "a").isalnum()]
    # The second of two adjacent names may be one too.
    cut = next((at for at, pair in enumerate(pairwise(names), 1) if all(isinstance(part, str) for part in pair)), None)
    path, param, name = _path(names), _path(names[:cut]) or None, str(names[0]) if names else ""
    if name in _UNSUPPORTED:
        return ApiError(400, f"{name}: {_UNSUPPORTED[name]}.", param=name, code=UNSUPPORTED)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unknown field: {path}.", param=param, code="unknown_parameter")
    problem = first["msg"].removeprefix("Value error, ")
    if first["type"] == "literal_error":
        value = repr(first["input"])[:_MAX_VALUE_CHARACTERS]
        problem = f"got {value} but expected {problem.removeprefix('Input should be ')}"
    elif first["type"] == "value_error" and problem.startswith(f"Got {path}="):
        return ApiError(400, problem, param=param)
    code = UNSUPPORTED if first["type"] == UNSUPPORTED else None
    return ApiError(400, ": ".join(filter(None, [path, problem])) + ".", param=param, code=code)


def _path(names: Sequence[int | str]) -> str:
    """A field's path as OpenAI writes it: `messages[1].role`."""
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).removeprefix(".")


def add_error_handlers(app: FastAPI) -> None:
    """Respond to every error in its API's shape, including the framework's own."""

    @app.exception_handler(ApiError)
    @app.exception_handler(EvenflowError)
    async def on_known_error(request: Request, error: EvenflowError | ApiError) -> Response:
        return as_api_error(error).response(request.scope["path"])

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}."
        headers = dict(error.headers or {})
        if error.status_code == 405:  # the framework names only one route's methods
            document = await asyncio.to_thread(app.openapi)  # takes a second when it is made
            if methods := document["paths"].get(request.url.path):
                headers["Allow"] = ", ".join(method.upper() for method in methods)
        return ApiError(error.status_code, message, headers=headers).response(request.scope["path"])

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(request: Request, error: ClientDisconnect) -> Response:
        refusal = ApiError(400, "The client disconnected before it had sent the whole body.")
        return refusal.response(request.scope["path"])

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        failure = ApiError(500, "Internal error; the server's log has the details.", kind="server_error")
        return failure.response(request.scope["path"])
