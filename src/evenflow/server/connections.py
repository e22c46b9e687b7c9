"""HTTP connections with limits on heads, on the time that a client takes, and on what is held for it.

uvicorn's protocol has none of these. They hold before any key is checked. The app sees only requests whose head is
complete and small.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, ClassVar, cast

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from evenflow.server.errors import ApiError, overloaded
from evenflow.server.held import Held
from evenflow.server.request_lines import RequestLines

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 64 << 10  # the URL and all headers
MAX_HEADERS = 128
MAX_SMALL_CHUNKS = 1024  # of a body, and one more for each 32 bytes of it: each takes as long as 1 kB of a large one
MAX_PIPELINED = 16  # requests behind a body that were parsed with it
HEADER_TIMEOUT_S = 10.0  # from the first byte, or from the connection if none comes
GRACE_S = 20.0  # a client that sends or reads less than the next two figures in such a time is given up
MIN_BYTES = 16 << 10
MIN_PART = 4  # of what is held for it: the more, the faster it must be
PIECE_BYTES = 16 << 10  # of a response that waits to be read; the rest waits in the app
_CONNECTION_BYTES = 16 << 10  # that a connection takes, about
_PIPELINED_BYTES = 4 << 10  # that a request takes which waits for the one before it, about
_MAX_READ_BYTES = 256 << 10  # that an event loop hands over at once
_END_OF_HEAD = b"\r\n\r\n"
_PROBE_DELAYS_S = (0.0, 0.1, 1.0)
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Written:
    """A transport that counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.num_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._transport.write(data)

    @property
    def num_unread(self) -> int:
        """Bytes that the client has no room for yet."""
        return self._transport.get_write_buffer_size()


class _WithoutWarnings:
    """uvicorn's logger. A warning for each request that is no HTTP could fill the log, and takes half of its time."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def warning(self, message: str, *args: object) -> None:
        pass


def bounded_protocol(owner_of: Callable[[Scope], str]) -> type[BoundedProtocol]:
    """The protocol for one server, whose connections share what is bounded for all of them."""
    return type("ServerProtocol", (BoundedProtocol,), {"held": Held(), "owner_of": staticmethod(owner_of)})


def in_pieces(app: ASGIApp, lines: RequestLines) -> ASGIApp:
    """Sends long bodies in pieces, each when those before it are read: the rest is counted as held.

    Of each response, the log's lines are told.
    """

    async def send_pieces(scope: Scope, receive: Receive, send: Send) -> None:
        line = lines.begin(scope)

        async def send_piece(message: Message) -> None:
            line.take(message)
            body = message.get("body", b"")
            if len(body) <= PIECE_BYTES:
                await send(message)
                return
            connection: BoundedProtocol = scope["state"]["connection"]
            for first in range(0, len(body), PIECE_BYTES):
                end = first + PIECE_BYTES
                connection.unsent_bytes = max(0, len(body) - end)
                more = end < len(body) or message.get("more_body", False)
                await send({**message, "body": body[first:end], "more_body": more})

        try:
            await app(scope, receive, send_piece)
        finally:
            lines.end(line)

    return send_pieces


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    held: ClassVar[Held]
    owner_of: ClassVar[Callable[[Scope], str]]  # of a request, by its head
    transport: Written  # type: ignore[assignment]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = cast("logging.Logger", _WithoutWarnings(self.logger))
        self.owner = ""  # the key of its last request, or its address
        self.url = b""  # uvicorn sets it when a request begins
        self._received = 0  # of an unfinished head
        self._head_bytes = 0  # of its complete headers
        self._num_headers = 0
        self._num_chunks = self._chunk_bytes = 0
        self._rest = b""  # requests that wait for the response before theirs, not parsed yet
        self._is_head_complete = False
        self._is_complete = True  # no request is being received
        self._body_bytes = 0  # since the timer was set
        self._request_bytes = 0  # of the body in all
        self.unsent_bytes = 0  # of a response that the app has, and the transport not yet
        self.app_bytes: Callable[[], int] = int  # what else the app holds for the current request
        self._unread: tuple[float, int] | None = None  # since when, and the bytes that must have been read in time
        self._running: RequestResponseCycle | None = None
        self.has_left = False  # is its client gone?
        self.turn: asyncio.Future[None] | None = None  # that its request waits for
        self._is_started = False  # has the app begun with it?
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", Written(transport)))
        self.transport.set_write_buffer_limits(high=PIECE_BYTES)
        self.owner = (self.client or ("",))[0]
        self.held.wait(self)
        self._set_timer(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self._unset_keepalive_if_required()
        self.held.discard(self)
        self.has_left = True
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)
        if self._running is not None:  # with a pipeline it is not the last one, which is all that uvicorn knows
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        # Its requests refer to it: only a full garbage collection would free both, and a flood leaves 40,000 of them.
        self.cycle = self.scope = self._running = None  # type: ignore[assignment]
        self.pipeline.clear()
        self._rest = b""
        self.app_bytes = int

    def start(self) -> None:
        """The app begins with the request."""
        self._is_started = True
        self._go_on()

    def _go_on(self) -> None:
        """Perhaps it waits no more: for its client to send or to read, or for its turn."""
        if self._is_started and self._is_complete and not self.flow.write_paused:
            self.held.go_on(self)

    @property
    def num_held(self) -> int:
        """Bytes that the server holds for it, about."""
        request = self._received + self._request_bytes + len(self._rest) + len(self.pipeline) * _PIPELINED_BYTES
        response = self.transport.num_unread + self.unsent_bytes + self.app_bytes()
        return _CONNECTION_BYTES + request + response

    def lose(self, reason: str) -> None:
        is_idle = self.cycle is not None and self.cycle.response_complete and self._is_complete
        if is_idle or self.transport.is_closing() or self.transport.num_unread:
            self.transport.abort()
        else:
            self._refusal = overloaded(reason)
            self.send_400_response(reason)

    def check(self, now: float) -> None:
        """Count what is held, and give up a client that does not read. Called about once a second."""
        self.held.hold(self, self.num_held)
        unread = self.transport.num_unread
        read = self.transport.num_bytes - unread
        if not unread:
            self._unread = None
        elif self._unread is None:
            self._unread = now, read + self._least_read(unread)
        elif now - self._unread[0] >= GRACE_S:
            if read < self._unread[1]:
                self.transport.abort()
            self._unread = now, read + self._least_read(unread)

    def _least_read(self, unread: int) -> int:
        """What a client must read in time, of what it could: all of it if there is little."""
        return max(MIN_BYTES, self.num_held // MIN_PART) if self.flow.write_paused else min(MIN_BYTES, unread)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.held.wait(self)
        self.held.hold(self, self.num_held)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.cycle.response_complete:
            self._go_on()

    def on_response_complete(self) -> None:
        self.unsent_bytes = self._request_bytes = 0
        self.app_bytes = int
        if not self.transport.is_closing():
            self.held.wait(self)
        super().on_response_complete()
        if self._rest:
            self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        """A request that is pipelined behind others is not even parsed before it is its turn."""
        self._rest += data
        while self._rest and not (self.pipeline or self._refusal is not None or self.transport.is_closing()):
            is_body = self._is_head_complete and not self._is_complete
            cut = -1 if is_body else self._rest.find(_END_OF_HEAD)
            end = len(self._rest) if cut < 0 else cut + len(_END_OF_HEAD)
            data, self._rest = self._rest[:end], self._rest[end:]
            self._take(data)
        if self._rest:
            self.flow.pause_reading()

    def _take(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        super().data_received(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._is_complete:
            self._end_timer()
            self._received = 0
            self._go_on()
        elif self._is_head_complete:
            self._received = 0
            self._body_bytes += len(data)
            self._request_bytes += len(data)
            self.held.hold(self, self.num_held)
            if self._timer is None:
                self._set_timer(GRACE_S)
        else:
            self._take_part_of_head(len(data))

    def _take_part_of_head(self, num_bytes: int) -> None:
        self._received += num_bytes  # perhaps with the end of the request before it
        self.held.wait(self)
        self.held.hold(self, self.num_held)
        if self._received > MAX_HEAD_BYTES + _MAX_READ_BYTES:  # in a single header that does not end
            self._head_bytes += self._received
            self._refuse_head()
            self.send_400_response("")
        elif self._timer is None:
            self._set_timer(HEADER_TIMEOUT_S)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether to stay open: a client that only stopped sending gets its response, unless that has begun.

        A client that closed its side for good looks the same until something is sent to it. What is sent then is an
        interim response, which HTTP allows at any time before the response.
        """
        cycle = self.cycle
        if not self._is_complete or cycle is None or cycle.response_started or cycle.response_complete:
            return False
        cycle.keep_alive = False
        if cycle.scope["http_version"] == "1.1":
            for delay in _PROBE_DELAYS_S:
                self.loop.call_later(delay, self._probe)
        return True

    def _probe(self) -> None:
        if not (self.transport.is_closing() or self.pipeline or self.cycle.response_started):
            self.transport.write(_PROBE)

    # ---- the parser ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast("dict[str, Any]", self.scope)["state"]["connection"] = self
        self._is_complete = self._is_head_complete = False
        self._received = self._head_bytes = self._num_headers = 0
        self._num_chunks = self._chunk_bytes = 0
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refuse(ApiError(429, f"Got more than {MAX_PIPELINED} requests before their responses."))

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._refuse_url()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._head_bytes += len(name) + len(value)
        if self._num_headers > MAX_HEADERS or self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
            raise ValueError
        if not self._is_head_complete:  # trailers mean nothing here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head_complete = True
        self._body_bytes = 0
        self._end_timer()
        super().on_headers_complete()
        self.owner = type(self).owner_of(cast("Scope", self.scope))  # before its body is held
        self.held.know(self)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        if self._num_chunks > MAX_SMALL_CHUNKS + self._chunk_bytes // 32:
            self._refuse(ApiError(400, f"Got {self._num_chunks} chunks of a body but expected fewer and larger ones."))

    def on_body(self, body: bytes) -> None:
        self._chunk_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running, self._is_started = cycle, False
        super()._start_asgi_task(cycle, app)

    # ---- refusals ----

    def _refuse_url(self) -> None:
        self._refuse(ApiError(414, f"Got a URL of {len(self.url)} bytes or more but expected at most {MAX_URL_BYTES}."))

    def _refuse_head(self) -> None:
        allowed = f"{MAX_HEADERS} headers and {MAX_HEAD_BYTES} bytes"
        self._refusal = ApiError(
            431, f"Got {self._num_headers} headers with {self._head_bytes} bytes so far but expected at most {allowed}."
        )

    def _refuse(self, refusal: ApiError) -> None:
        """Stop the parser, which then calls `send_400_response`."""
        self._refusal = refusal
        raise ValueError(refusal.message)

    def send_400_response(self, msg: str) -> None:
        self._refusal = self._refusal or ApiError(400, msg)
        self._end_timer()
        if self.cycle is None or self.cycle.response_complete or not self._is_answering():
            path = self.url.partition(b"?")[0].decode("latin-1")
            self.transport.write(_written(self._refusal.response(path)))
            self.transport.close()
        elif self.flow.write_paused:
            self.transport.abort()  # nobody reads: it would never close
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        """Whether part of a response has been written: nothing else may be written into it."""
        running = self.cycle if not self.pipeline else None
        return running is None or running.response_started

    def give_up(self, reason: str) -> None:
        """End a request that is not received in time."""
        if not self.transport.is_closing():
            self._refusal = ApiError(408, reason, code="request_timeout")
            self.send_400_response(reason)

    # ---- time ----

    def _set_timer(self, seconds: float) -> None:
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        if not self._is_head_complete:
            self.give_up(f"The request's head did not come within {HEADER_TIMEOUT_S:g} s.")
        elif not self._is_complete:
            # What the app is not ready to read is not the client's delay.
            least = max(MIN_BYTES, self._request_bytes // MIN_PART)
            if self.flow.read_paused or self._body_bytes >= least:
                self._body_bytes = 0
                self._set_timer(GRACE_S)
            else:
                self.give_up(f"The request's body came too slowly: expected {least} bytes or more in {GRACE_S:g} s.")


def _written(response: Response) -> bytes:
    """A response as it goes over a connection that is then closed."""
    headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"connection: close\r\n\r\n" + bytes(response.body)
