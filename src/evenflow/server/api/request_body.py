"""Reads a request's body, after checks of its type, its size and its number of values: a bad one costs little."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from evenflow.server.api.json_size import count_values
from evenflow.server.api.large_work import SMALL_BYTES
from evenflow.server.api.service import Service
from evenflow.server.errors import ApiError, invalid_body

MAX_VALUES = 1 << 18  # in one body: parsing that many takes a tenth of a second and 20 MB

_MAX_DIGITS = 20  # of a size: Python converts very long numbers slowly

BodyType = TypeVar("BodyType", bound=BaseModel)
Result = TypeVar("Result")


async def read_body(
    request: Request, service: Service, kind: type[BodyType], max_bytes: int = 0
) -> tuple[BodyType, int]:
    """The body as `kind` and its size, or an ApiError that says what is wrong with it."""
    return await make_of_body(request, service, kind, lambda body: body, max_bytes)


async def make_of_body(
    request: Request, service: Service, kind: type[BodyType], make: Callable[[BodyType], Result], max_bytes: int = 0
) -> tuple[Result, int]:
    """What `make` makes of it, in the same job: each handover to a thread takes up to tenths of a second under load."""
    # Browsers send other types across origins without a preflight request.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, f"Got Content-Type {content_type!r} but expected application/json.")
    client, work = request.state.caller.client, service.large_work
    async with work.body(client) if may_be_large(request) else nullcontext():
        content = await read_bytes(request, max_bytes or service.gate.limits.max_body_size)
        return await work.run(len(content), client, lambda: make(_parse(kind, content))), len(content)


def may_be_large(request: Request) -> bool:
    """Judging by the announced size."""
    if "transfer-encoding" in request.headers:
        return True
    announced = request.headers.get("content-length", "")
    return announced.isdecimal() and int(announced[:_MAX_DIGITS]) > SMALL_BYTES


def _parse(kind: type[BodyType], content: bytes) -> BodyType:
    if len(content) > SMALL_BYTES and (count := count_values(content)) > MAX_VALUES:
        raise ApiError(413, f"Got a body with {count} JSON values but this server allows {MAX_VALUES}.")
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error) from None


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The raw body, or an ApiError if it is too large."""

    def check(size: int) -> None:
        if size > max_bytes:
            raise ApiError(413, f"Got a body of {size} bytes or more but this server allows {max_bytes}.")

    announced = request.headers.get("content-length", "")
    check(int(announced[:_MAX_DIGITS]) if announced.isdecimal() else 0)
    content = bytearray()
    async for part in request.stream():
        content += part
        check(len(content))
    return bytes(content)
