"""What a command compares: servers by address, and policies that share one embedded engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

from evenflow.bench.endpoints import Endpoint, HttpEndpoint, PolicyEndpoint
from evenflow.cli.output import loading
from evenflow.core.policies import PolicySpec
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import InvalidInput


def check_sides(sides: Sequence[str]) -> None:
    for side in sides:
        if not _is_address(side):
            PolicySpec.parse(side)
        if sides.count(side) > 1:
            raise InvalidInput(f"Got {side!r} twice but expected sides that differ.")


def _is_address(side: str) -> bool:
    return side.startswith(("http://", "https://"))


@asynccontextmanager
async def open_sides(
    sides: Sequence[str], model: str, record: Path | None = None, **settings: Any
) -> AsyncIterator[list[Endpoint]]:
    """The endpoints. `model` is what the policies' engine loads, or the name of a served model; default: the first.

    Servers that need a key get the one in $EVENFLOW_API_KEY.
    """
    llm = None
    if not all(map(_is_address, sides)):
        with loading(model):
            # Under a target the engine has step times from the start.
            llm = AsyncLLM(model, record=record, policy="target:1000ms", **settings)
    async with llm or nullcontext():
        yield [_endpoint(side, model, llm) for side in sides]


def _endpoint(side: str, model: str, llm: AsyncLLM | None) -> Endpoint:
    if not _is_address(side):
        assert llm is not None
        return PolicyEndpoint(side, llm)
    address = side.rstrip("/").removesuffix("/v1")
    return HttpEndpoint(address, None if model == "default" else model, os.environ.get("EVENFLOW_API_KEY"))
