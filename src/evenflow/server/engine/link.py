"""The front's end of a socket to one of its processes: frames out, frames in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from evenflow.framing import FrameReader, frame


class Link(asyncio.Protocol):
    """Calls `on_frame` with the content of every frame; `lost` ends with the connection."""

    def __init__(self, on_frame: Callable[[bytes], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_frame = on_frame
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    async def connect(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connection)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self._on_frame(content)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. It is lost if the connection has ended, as it is if the process dies before it reads it."""
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(frame(message))

    def close(self) -> None:
        """The process sees this and ends."""
        if self._transport is not None:
            self._transport.close()
