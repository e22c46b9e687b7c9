"""Shares a few slots for slow work among clients, so that what one client sends delays no other's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from evenflow.server.errors import overloaded


class FairSlots:
    """Gives each client one slot at a time, clients in turn. `max_waiting` bounds each client's queue."""

    def __init__(self, num_slots: int, max_waiting: int, work: str) -> None:
        self._num_free = num_slots
        self._max_waiting = max_waiting
        self._work = work
        self._running: set[str] = set()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn it is comes first

    @asynccontextmanager
    async def slot(self, client: str) -> AsyncIterator[None]:
        """Wait for this client's turn, and hold its slot during the context; a 429 if its queue is full."""
        await self._enter(client)
        try:
            yield
        finally:
            self._leave(client)

    async def _enter(self, client: str) -> None:
        if self._num_free and client not in self._running:
            self._start(client)
            return
        queue = self._waiting.setdefault(client, deque())
        if len(queue) >= self._max_waiting:
            raise overloaded(f"{self._max_waiting} of your requests wait for {self._work} already.", status=429)
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn came at the same moment
                self._leave(client)
            raise

    def _start(self, client: str) -> None:
        self._num_free -= 1
        self._running.add(client)

    def _leave(self, client: str) -> None:
        self._num_free += 1
        self._running.discard(client)
        for name in list(self._waiting):
            queue = self._waiting[name]
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and name in self._running:
                continue
            del self._waiting[name]
            if queue:
                turn = queue.popleft()
                if queue:
                    self._waiting[name] = queue  # behind the other clients
                self._start(name)
                turn.set_result(None)
                return
