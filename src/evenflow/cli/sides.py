"""Endpoints that a command runs on or compares: servers by address, transformers models, embedded engine policies.

All policies share one engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from evenflow.bench.endpoints import Endpoint, HttpEndpoint, PolicyEndpoint
from evenflow.bench.transformers_endpoint import TransformersEndpoint
from evenflow.cli.interrupts import stopping_after_step
from evenflow.cli.output import loading
from evenflow.core.policies import PolicySpec
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import InvalidConfig, InvalidInput

CHUNKED = "chunked"  # by a fixed policy, so that runs on different machines can be compared
_CHUNKED_POLICY = "fixed:512"
_TRANSFORMERS = {"hf": True, "hf-unchunked": False}  # whether long prompts run in chunks


def check_sides(sides: Sequence[str]) -> None:
    for side in sides:
        if (found := _transformers_folder(side)) is not None:
            if not Path(found).is_dir():
                raise InvalidInput(f"Got {side!r} but there is no folder {found!r}.")
        elif not is_address(side):
            _check_policy(side)
        if list(map(policy_of, sides)).count(policy_of(side)) > 1:
            raise InvalidInput(f"Got {side!r} twice but expected sides that differ.")


def _check_policy(side: str) -> None:
    try:
        PolicySpec.parse(policy_of(side))
    except InvalidConfig as error:
        if side == "default" or Path(side).exists():
            raise InvalidInput(
                f"Got the model {side!r} as an endpoint: --model names the engine's model, hf:FOLDER runs one in "
                "transformers."
            ) from error
        raise


def is_address(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def is_policy(side: str) -> bool:
    return not is_address(side) and _transformers_folder(side) is None


def policy_of(side: str) -> str:
    """What a side that is a policy stands for; any other side as it is."""
    return _CHUNKED_POLICY if side == CHUNKED else side


def _transformers_folder(side: str) -> str | None:
    kind, _, folder = side.partition(":")
    return str(Path(folder).expanduser()) if kind in _TRANSFORMERS else None


@asynccontextmanager
async def open_sides(
    sides: Sequence[str], model: str, record: Path | None = None, **settings: Any
) -> AsyncIterator[list[Endpoint]]:
    """The endpoints. `model` is what the policies' engine loads, or the name of a served model; default: the first.

    Servers that need a key get the one in $EVENFLOW_API_KEY. An interrupt cancels the task that runs the block.
    """
    llm = None
    if any(map(is_policy, sides)):
        with loading(model):
            # Under a target the engine has step times from the start.
            llm = AsyncLLM(model, record=record, policy="target:1000ms", **settings)
    with _cancelled_by_interrupts():
        async with llm or nullcontext():
            yield [_endpoint(side, model, llm) for side in sides]


@contextmanager
def _cancelled_by_interrupts() -> Iterator[None]:
    """The task that runs the block. If it does not handle that, the interrupt goes on."""
    task, loop, is_interrupted = asyncio.current_task(), asyncio.get_running_loop(), False
    assert task is not None

    def cancel() -> None:
        nonlocal is_interrupted
        is_interrupted = True
        loop.call_soon_threadsafe(task.cancel)  # wakes the loop

    try:
        with stopping_after_step(cancel):
            yield
    except asyncio.CancelledError:
        if is_interrupted:
            raise KeyboardInterrupt from None
        raise


def _endpoint(side: str, model: str, llm: AsyncLLM | None) -> Endpoint:
    if (folder := _transformers_folder(side)) is not None:
        return TransformersEndpoint(side, folder, chunked=_TRANSFORMERS[side.partition(":")[0]])
    if is_policy(side):
        assert llm is not None
        return PolicyEndpoint(policy_of(side), llm)
    return HttpEndpoint(*server_arguments(side, model))


def server_arguments(url: str, model: str) -> tuple[str, str | None, str | None]:
    """The address, model and key of a server, in the order in which an HttpEndpoint takes them."""
    address = url.rstrip("/").removesuffix("/v1")
    return address, None if model == "default" else model, os.environ.get("EVENFLOW_API_KEY")
