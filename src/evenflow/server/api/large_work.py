"""Processes large requests on threads of their own, a few at a time, taking clients in turn.

Small requests never wait for it, and its cost is bounded before it starts.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import ParamSpec, TypeVar

from evenflow.server.api.fair_slots import FairSlots

SMALL_BYTES = 1 << 16  # parsing or tokenizing more on the event loop would delay other streams

_BODIES_PER_CLIENT = 2  # received and parsed at once
_MAX_WAITING = 64  # bodies or prompts of one client
_NUM_THREADS = 4  # one client takes one of them

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LargeWork:
    """Large bodies and prompts of all clients."""

    def __init__(self) -> None:
        # For each client alone: a slow one delays no other, and what all send is bounded by `Held`.
        self._bodies = FairSlots(sys.maxsize, _BODIES_PER_CLIENT, _MAX_WAITING, "their bodies to be read")
        self._jobs = FairSlots(_NUM_THREADS, 1, _MAX_WAITING, "their prompts to be prepared")
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "evenflow-large-work")

    def body(self, client: str) -> AbstractAsyncContextManager[None]:
        """Held while a large body is received and parsed."""
        return self._bodies.slot(client)

    async def run(
        self,
        num_bytes: int,
        client: str,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """Call a function whose work grows with a request's size: at once if that is small, else on a thread."""
        if num_bytes <= SMALL_BYTES:
            return function(*args, **options)
        return await self._in_turn(client, function, *args, **options)

    async def run_on_thread(
        self,
        num_bytes: int,
        client: str,
        function: Callable[Arguments, Result],
        *args: Arguments.args,
        **options: Arguments.kwargs,
    ) -> Result:
        """The same, but never on the event loop: a small text may take long to tokenize."""
        if num_bytes <= SMALL_BYTES:
            return await asyncio.to_thread(function, *args, **options)
        return await self._in_turn(client, function, *args, **options)

    async def _in_turn(
        self, client: str, function: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        async with self._jobs.slot(client):
            call = self._threads.submit(function, *args, **options)
            return await asyncio.wrap_future(call)
