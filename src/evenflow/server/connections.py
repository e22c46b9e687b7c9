"""HTTP connections with limits on heads, time and unfinished requests. uvicorn's protocol has none of these.

They hold before any key is checked. The app sees only requests whose head is complete and small.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any, ClassVar

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from evenflow.server.errors import ApiError

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 64 << 10  # the URL and all headers
MAX_HEADERS = 128
MAX_PIPELINED = 64  # requests that wait for the response before theirs
HEADER_TIMEOUT_S = 10.0  # from the first byte, or from the connection if none comes
BODY_GRACE_S = 20.0  # a body that is slower than the next figure in such a time is given up
MIN_BODY_BYTES = 16 << 10
MAX_UNFINISHED = 4096  # requests that are being received, on all connections; the oldest makes room
MAX_UNFINISHED_BYTES = 16 << 20  # of their heads
_MAX_READ_BYTES = 256 << 10  # that an event loop hands over at once
_PROBE_DELAYS_S = (0.0, 0.1, 1.0)
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Unfinished:
    """The connections whose request is being received, oldest first."""

    def __init__(self) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = min(MAX_UNFINISHED, max(1, files // 2)) if files > 0 else MAX_UNFINISHED
        self._head_bytes: dict[BoundedProtocol, int] = {}
        self._num_bytes = 0

    def update(self, connection: BoundedProtocol, head_bytes: int) -> None:
        """Count this connection's request with this much of its head; make room if that is too much."""
        self._num_bytes += head_bytes - self._head_bytes.get(connection, 0)
        self._head_bytes[connection] = head_bytes
        while len(self._head_bytes) > self._most or self._num_bytes > MAX_UNFINISHED_BYTES:
            oldest = next(iter(self._head_bytes))
            self.discard(oldest)
            oldest.give_up("The server has too many unfinished requests, and this one is the oldest.")

    def discard(self, connection: BoundedProtocol) -> None:
        self._num_bytes -= self._head_bytes.pop(connection, 0)


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Requests that are no HTTP get a response; a line for each would let anyone fill the log."""
    return record.msg != "Invalid HTTP request received."


def bounded_protocol() -> type[BoundedProtocol]:
    """The protocol for one server, whose connections share what is bounded for all of them."""
    logging.getLogger("uvicorn.error").addFilter(_is_worth_logging)
    return type("ServerProtocol", (BoundedProtocol,), {"unfinished": Unfinished()})


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    unfinished: ClassVar[Unfinished]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.url = b""  # uvicorn sets it when a request begins
        self._received = 0  # of an unfinished head
        self._head_bytes = 0  # of its complete headers
        self._num_headers = 0
        self._is_head_complete = False
        self._is_complete = True  # no request is being received
        self._body_bytes = 0  # since the timer was set
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.unfinished.update(self, 0)
        self._set_timer(HEADER_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        self.unfinished.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        super().data_received(data)
        if self._refusal is not None or self.transport.is_closing():
            return
        if self._is_complete:
            self._end_timer()
            self.unfinished.discard(self)
        elif self._is_head_complete:
            self.unfinished.update(self, 0)
            self._body_bytes += len(data)
            if self._timer is None:
                self._set_timer(BODY_GRACE_S)
        else:
            self._take_part_of_head(len(data))

    def _take_part_of_head(self, num_bytes: int) -> None:
        self._received += num_bytes  # perhaps with the end of the request before it
        self.unfinished.update(self, self._received)
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
        if not (self.pipeline or self.cycle.response_started or self.transport.is_closing()):
            self.transport.write(_PROBE)

    # ---- the parser ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_complete = self._is_head_complete = False
        self._received = self._head_bytes = self._num_headers = 0
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

    def on_message_complete(self) -> None:
        self._is_complete = True
        super().on_message_complete()

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
            if self.flow.read_paused or self._body_bytes >= MIN_BODY_BYTES:
                self._body_bytes = 0
                self._set_timer(BODY_GRACE_S)
            else:
                self.give_up(f"The request's body stopped coming for {BODY_GRACE_S:g} s.")


def _written(response: Response) -> bytes:
    """A response as it goes over a connection that is then closed."""
    headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
    return STATUS_LINE[response.status_code] + headers + b"connection: close\r\n\r\n" + bytes(response.body)
