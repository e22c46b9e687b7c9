"""Starts requests a few in a round of the event loop, clients in turn: a burst of one delays no other's.

Starting a request takes up to a millisecond, and a client without any key can send a thousand at once. What waits is
bounded with all connections that wait (`Held`): a refusal would cost as much as a start, and the next request of the
connection would come at once.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

from evenflow.server.lanes import Lanes

_STARTS_PER_ROUND = 4


class Turns:
    """Middleware. Those share a turn who own a connection: the fewer a client can make up, the better."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._lanes: Lanes[asyncio.Future[None]] = Lanes()
        self._num_started = 0  # in this round

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            connection = scope["state"]["connection"]
            if self._lanes or self._num_started >= _STARTS_PER_ROUND:
                connection.turn = turn = asyncio.get_running_loop().create_future()
                self._lanes.put(connection.owner, turn)
                await turn
                if connection.has_left:
                    return
            else:
                self._count()
            connection.start()
        await self._app(scope, receive, send)

    def _count(self) -> None:
        if not self._num_started:
            asyncio.get_running_loop().call_soon(self._next_round)
        self._num_started += 1

    def _next_round(self) -> None:
        self._num_started = 0
        while self._lanes and self._num_started < _STARTS_PER_ROUND:
            turn = self._lanes.take()
            if not turn.done():  # its client is still there
                turn.set_result(None)
                self._count()
