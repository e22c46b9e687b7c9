"""Accepts connections at once, and opens them a few in a round of the event loop, clients in turn.

Accepting takes a tenth of opening. Behind a thousand connections of others, a client would otherwise wait in the
system's queue for a second, and for another one whenever that is full. Whose turn it is, the first bytes tell, which
are only looked at.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from starlette.types import Scope

from evenflow.server.held import Held
from evenflow.server.lanes import Lanes

logger = logging.getLogger("evenflow")

_ACCEPTED_PER_ROUND = 256  # of the event loop; uvloop by itself takes one
_OPENED_PER_ROUND = 32
_NO_FILES_PAUSE_S = 1.0  # without accepting, when no more files can be opened
_PEEKED_BYTES = 4 << 10


class Arrival:
    """A connection that is accepted and not opened."""

    def __init__(self, connection: socket.socket, owner: str) -> None:
        self.connection = connection
        self.owner = owner
        self.is_lost = False

    def lose(self, reason: str) -> None:
        self.is_lost = True
        self.connection.close()


class Arrivals:
    """Those of one listener."""

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        held: Held,
        owner_of: Callable[[Scope], str],
    ) -> None:
        self._listener = listener
        self._new_protocol = new_protocol
        self._held = held
        self._owner_of = owner_of
        self._loop = asyncio.get_running_loop()
        self._lanes: Lanes[Arrival] = Lanes()
        self._next_round: asyncio.Handle | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        listener.setblocking(False)
        self._start()

    def close(self) -> None:
        """The listener itself stays open."""
        self._loop.remove_reader(self._listener)
        for handle in (self._pause, self._next_round):
            if handle is not None:
                handle.cancel()
        while self._lanes:
            arrival = self._lanes.take()
            self._held.go_on(arrival)
            arrival.connection.close()

    def _start(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_PER_ROUND):
            try:
                connection, client = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                break
            except OSError as error:
                logger.error("Cannot accept connections: %s. Next try in %g s.", error.strerror, _NO_FILES_PAUSE_S)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_NO_FILES_PAUSE_S, self._start)
                break
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            arrival = Arrival(connection, self._owner_of(_peeked_scope(connection, client)))
            self._lanes.put(arrival.owner, arrival)
            self._held.wait(arrival)
        if self._next_round is None:
            self._open_some()

    def _open_some(self) -> None:
        num_opened = 0
        while self._lanes and num_opened < _OPENED_PER_ROUND:
            arrival = self._lanes.take()
            if not arrival.is_lost:
                self._held.go_on(arrival)
                self._open(arrival.connection)
                num_opened += 1
        self._next_round = self._loop.call_soon(self._open_some) if self._lanes else None

    def _open(self, connection: socket.socket) -> None:
        opening = self._loop.create_task(self._loop.connect_accepted_socket(self._new_protocol, connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)


def _peeked_scope(connection: socket.socket, client: tuple[str, int]) -> Scope:
    """Who sends its first request, as far as it is there already. A wrong guess costs its sender a turn, no more."""
    try:
        data = connection.recv(_PEEKED_BYTES, socket.MSG_PEEK)
    except OSError:
        data = b""
    line, *fields = data.partition(b"\r\n\r\n")[0].split(b"\r\n")
    path = line.partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]
    named = [field.partition(b":") for field in fields]
    headers = [(name.lower(), value.strip()) for name, _, value in named]
    return {"type": "http", "client": client, "path": path.decode("latin-1"), "headers": headers}
