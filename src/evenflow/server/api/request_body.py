"""Reads a request's body: checks its type and size before its JSON, so a bad one costs little."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from evenflow.server.errors import ApiError, invalid_body

_THREAD_BYTES = 1 << 16  # parsing larger bodies on the event loop would delay other streams

BodyType = TypeVar("BodyType", bound=BaseModel)


async def read_body(request: Request, kind: type[BodyType], max_bytes: int) -> BodyType:
    """The body as `kind`, or an ApiError that says what is wrong with it."""
    # Browsers send other types across origins without a preflight request.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, f"Got Content-Type {content_type!r} but expected application/json.")
    content = await read_bytes(request, max_bytes)
    try:
        if len(content) > _THREAD_BYTES:
            return await asyncio.to_thread(kind.model_validate_json, content)
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error) from None


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The raw body, or an ApiError if it is too large."""

    def check(size: int) -> None:
        if size > max_bytes:
            raise ApiError(413, f"Got a body of {size} bytes or more but this server allows {max_bytes}.")

    announced = request.headers.get("content-length", "")
    check(int(announced) if announced.isdecimal() else 0)
    content = bytearray()
    async for part in request.stream():
        content += part
        check(len(content))
    return bytes(content)
