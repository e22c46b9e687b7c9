"""Reads the body of a request: its size, its type, its JSON, in this order, so that little is spent on a bad one.

Must not know: what a body is for.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from evenflow.server.api.errors import ApiError, invalid_body

_BODY_FOR_A_THREAD = 1 << 16  # bytes whose parsing the other streams would feel

BodyType = TypeVar("BodyType", bound=BaseModel)


async def read_body(request: Request, kind: type[BodyType], max_bytes: int) -> BodyType:
    """The body as `kind`, or the ApiError that says what is wrong with it."""
    # Browsers send other types across sites without asking; JSON they do not.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, f"Got Content-Type {content_type!r} but expected application/json.")
    content = await read_bytes(request, max_bytes)
    try:
        if len(content) > _BODY_FOR_A_THREAD:
            return await asyncio.to_thread(kind.model_validate_json, content)
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise invalid_body(error) from None


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body as it came, or the ApiError where it is too large."""
    announced = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = int(announced) if announced.isdecimal() else 0
    if size <= max_bytes:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > max_bytes:
                break
            parts.append(part)
    if size > max_bytes:
        raise ApiError(413, f"Got a body of {size} bytes or more but this server takes {max_bytes}.")
    return b"".join(parts)
