"""Lines of the server's log about HTTP requests: the refused ones, at a bounded rate, and on request all of them.

No line has the text of a prompt or answer. A refusal's line has its message, which may quote a field's value.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.types import Message, Scope

from evenflow.errors import printable
from evenflow.log_output import with_fields
from evenflow.server.access import MONITORED

logger = logging.getLogger("evenflow")

INTERVAL_S = 10.0
MAX_LINES = 10  # about refused requests, in this interval
_MAX_CHARACTERS = 200  # of a path or message
_MAX_BODY_BYTES = 1 << 16  # of a refusal, which is parsed for its message


@dataclass(slots=True)
class RequestLine:
    """What a line says about a request."""

    scope: Scope
    started_at: float
    status: int | None = None  # None: no response
    num_bytes: int = 0  # of the response's body
    refusal: list[bytes] = field(default_factory=list)

    def take(self, message: Message) -> None:
        """A part of the response is sent."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body = message.get("body", b"")
        self.num_bytes += len(body)
        if self.is_refused and self.num_bytes <= _MAX_BODY_BYTES:
            self.refusal.append(body)

    @property
    def is_refused(self) -> bool:
        return self.status is not None and self.status >= 400

    @property
    def fields(self) -> dict[str, Any]:
        caller = self.scope.get("state", {}).get("caller")
        return {
            "client": (self.scope.get("client") or ("",))[0],
            "key": "" if caller is None else caller.name,
            "method": _short(self.scope["method"]),
            "path": _short(self.scope["path"]),
            "status": self.status,
        }

    def reason(self) -> tuple[str, str]:
        """The code and the message of a refusal, in the form of any API."""
        try:
            body = msgspec.json.decode(b"".join(self.refusal))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "", ""
        error = body.get("error", body) if isinstance(body, dict) else body
        if not isinstance(error, dict):
            return "", _short(str(error))
        details = error.get("details")
        code = error.get("code") or (details.get("error_code") if isinstance(details, dict) else "")
        return _short(str(code or "")), _short(str(error.get("message", "")))


class RequestLines:
    """Writes the lines of one server. Call it on the event loop's thread."""

    def __init__(self, logs_all: bool = False) -> None:
        self._logs_all = logs_all
        self._num_lines = 0  # about refusals, in this interval
        self._others: Counter[int] = Counter()  # refusals without a line, by status
        self._interval: asyncio.TimerHandle | None = None

    def begin(self, scope: Scope) -> RequestLine:
        return RequestLine(scope, time.perf_counter())

    def end(self, line: RequestLine) -> None:
        if self._logs_all:
            _log_access(line)
        if line.is_refused and line.scope["path"] not in MONITORED:
            self._take_refusal(line)

    def close(self) -> None:
        """Log what is left to say."""
        if self._interval is not None:
            self._interval.cancel()
            self._end_interval()

    def _take_refusal(self, line: RequestLine) -> None:
        if self._interval is None:
            self._interval = asyncio.get_running_loop().call_later(INTERVAL_S, self._end_interval)
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            _log_refusal(line)
        elif line.status is not None:
            self._others[line.status] += 1

    def _end_interval(self) -> None:
        others, self._others, self._num_lines, self._interval = self._others, Counter(), 0, None
        if others:
            by_status = ", ".join(f"{count} with {status}" for status, count in sorted(others.items()))
            more = with_fields(refused={str(status): count for status, count in others.items()})
            logger.info("Refused %d more requests: %s.", others.total(), by_status, extra=more)


def _log_refusal(line: RequestLine) -> None:
    fields = line.fields
    code, message = line.reason()
    logger.info(
        "Refused %s %s from %s: %s%s. %s",
        *(fields["method"], fields["path"], _sender(fields), fields["status"], f" {code}" if code else "", message),
        extra=with_fields(**fields, code=code, reason=message),
    )


def _log_access(line: RequestLine) -> None:
    fields, seconds = line.fields, round(time.perf_counter() - line.started_at, 6)
    logger.info(
        "%s %s from %s: %s, %d bytes in %.3f s",
        *(fields["method"], fields["path"], _sender(fields), fields["status"] or "no response"),
        *(line.num_bytes, seconds),
        extra=with_fields(**fields, bytes=line.num_bytes, seconds=seconds),
    )


def _sender(fields: dict[str, Any]) -> str:
    return " ".join(filter(None, (fields["key"], fields["client"]))) or "an unknown address"


def _short(text: str) -> str:
    return printable(text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…")
