"""Reports a host engine's steps: a line in its log every 10 s, and each step to evenflow's front.

Sending never blocks: what does not fit in the socket's buffer waits in memory, up to a limit.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

from evenflow.core.report import LOG_INTERVAL_S, StepReport
from evenflow.framing import frame
from evenflow.hosts.messages import HostStep, RequestArrived, RequestLeft

_MAX_UNSENT_BYTES = 4 << 20  # thousands of steps
_MAX_UNSENT_REQUESTS = 10_000  # arrivals, and as many ends, while a slow reader misses steps


@dataclass(slots=True)
class _Interval:
    """What the next line of the log will say."""

    since: float
    num_steps: int = 0
    num_mixed_steps: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_late_tokens: int = 0
    worst_gap: float = 0.0
    errors: list[float] = field(default_factory=list)  # of predictions, relative

    def add(self, report: StepReport) -> None:
        self.num_steps += 1
        self.num_tokens += report.num_output_tokens
        self.num_late_tokens += len(report.late)
        self.worst_gap = max([self.worst_gap, *(late.gap for late in report.late)])
        if report.is_mixed:
            self.num_mixed_steps += 1
            self.num_prefill_tokens += report.num_prefill_tokens
            if (error := report.prediction_error) is not None:
                self.errors.append(error)

    def log(self, logger: logging.Logger, report: StepReport) -> None:
        if not self.num_mixed_steps or report.target_s is None:
            return
        logger.info(
            "evenflow: in %.0f s %d steps, %d of them with prefill beside decodes (%.0f tokens each on average); "
            "%.2f%% of %d tokens later than %.0f ms, longest gap of these %.0f ms%s",
            report.at - self.since,
            self.num_steps,
            self.num_mixed_steps,
            self.num_prefill_tokens / self.num_mixed_steps,
            100 * self.num_late_tokens / max(1, self.num_tokens),
            self.num_tokens,
            1000 * report.target_s,
            1000 * self.worst_gap,
            f"; step times predicted within {100 * fmean(self.errors):.1f}%" if self.errors else "",
        )


class _Sender:
    """Sends to a Unix stream socket without blocking, and reconnects when the other end comes back."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._unsent = bytearray()

    def has_room(self) -> bool:
        """False: the backlog is so long that the reader must have stopped."""
        self._flush()
        return len(self._unsent) < _MAX_UNSENT_BYTES

    def send(self, content: bytes) -> None:
        self._unsent += content
        self._flush()

    def _flush(self) -> None:
        try:
            if self._socket is None:
                self._socket = _connect(self._path)
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # the reader is slow
        except OSError:  # there is no reader
            self.close()

    def close(self) -> None:
        self._unsent.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Reporter:
    """Logs and sends reports as steps end."""

    def __init__(self, logger: logging.Logger, step_socket: str | None) -> None:
        self._logger = logger
        self._interval: _Interval | None = None
        self._arrived: deque[RequestArrived] = deque(maxlen=_MAX_UNSENT_REQUESTS)  # since the last message
        self._left: deque[RequestLeft] = deque(maxlen=_MAX_UNSENT_REQUESTS)
        self._sender = _Sender(step_socket) if step_socket else None

    def arrived(self, request_id: str, at: float, num_prompt_tokens: int, max_tokens: int) -> None:
        if self._sender is not None:
            self._arrived.append(RequestArrived(request_id, at, num_prompt_tokens, max_tokens))

    def left(self, request_id: str, num_output_tokens: int) -> None:
        if self._sender is not None:
            self._left.append(RequestLeft(request_id, num_output_tokens))

    def report(self, report: StepReport) -> None:
        if self._interval is None:
            self._interval = _Interval(since=report.started_at)
        self._interval.add(report)
        if report.at - self._interval.since >= LOG_INTERVAL_S:
            self._interval.log(self._logger, report)
            self._interval = None
        if self._sender is not None and self._sender.has_room():
            self._sender.send(frame(HostStep(report, list(self._arrived), list(self._left))))
            self._arrived.clear()
            self._left.clear()

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
