"""Shares a few slots for slow work among clients, so that what one client sends delays no other's."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from evenflow.server.errors import overloaded


class FairSlots:
    """Gives each client a few slots at a time, clients in turn. `max_waiting` bounds each client's queue."""

    def __init__(self, num_slots: int, per_client: int, max_waiting: int, work: str) -> None:
        self._num_free = num_slots
        self._per_client = per_client
        self._max_waiting = max_waiting
        self._work = work
        self._running: Counter[str] = Counter()
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
        if self._num_free and self._running.get(client, 0) < self._per_client:
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
            elif turn in queue:
                queue.remove(turn)
                if not queue:
                    del self._waiting[client]
            raise

    def _start(self, client: str) -> None:
        self._num_free -= 1
        self._running[client] += 1

    def _leave(self, client: str) -> None:
        self._num_free += 1
        self._running[client] -= 1
        if not self._running[client]:
            del self._running[client]
        for name in list(self._waiting):
            queue = self._waiting[name]
            while queue and queue[0].cancelled():
                queue.popleft()
            if queue and self._running.get(name, 0) >= self._per_client:
                continue
            del self._waiting[name]
            if queue:
                turn = queue.popleft()
                if queue:
                    self._waiting[name] = queue  # behind the other clients
                self._start(name)
                turn.set_result(None)
                return
