"""The request log: JSON lines that account for each request, without its text. `request_accounts` reads them.

    {"event": "opened", ...}         the server starts; requests of earlier runs have ended
    {"event": "accepted", ...}       a request was accepted
    {"event": "first_token", ...}    it got its first token
    {"event": "retried", ...}        it is recomputed after a fault
    {"event": "ended", ...}          it ended; with its figures
    {"event": "lost", "lines": N}    lines that could not be written
    {"event": "closed", ...}         the server ends

A thread writes the lines, so a slow disk delays no stream. If the disk is full, lines are lost and serving continues.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from evenflow import __version__
from evenflow.core.report import StepReport
from evenflow.errors import InvalidInput
from evenflow.line_file import LineFile
from evenflow.server.metrics.observer import Listener, Observer, ServedRequest

logger = logging.getLogger("evenflow")

_MAX_PENDING = 10_000  # unwritten lines
_CLOSE_S = 2.0  # to write the last lines


class RequestLog(Listener):
    """Appends to a file; starts a new one after the file was renamed or deleted."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._open_requests = observer.requests
        self._clock = observer.clock
        self._gaps: dict[str, tuple[float, float]] = {}  # the last token's time, and the longest gap so far
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_PENDING)
        self._writer = _Writer(path, self._lines)
        self._thread = threading.Thread(target=self._writer.run, name="evenflow-request-log", daemon=True)
        self._thread.start()
        self._write("opened", time=_text(time.time()), version=__version__)
        observer.listen(self)

    def on_step(self, report: StepReport) -> None:
        gaps, now = self._gaps, report.at
        for request_id, tokens in zip(report.ids, report.tokens, strict=True):
            if tokens and request_id in self._open_requests:
                last, longest = gaps.get(request_id, (now, 0.0))
                gaps[request_id] = now, max(longest, now - last)

    def on_request_started(self, record: ServedRequest) -> None:
        self._write("accepted", **self._about(record), max_tokens=record.max_tokens)

    def on_first_token(self, record: ServedRequest) -> None:
        self._write("first_token", id=record.request_id, ttft_s=_since(record.started_at, record.first_token_at))

    def on_request_retried(self, record: ServedRequest) -> None:
        if record.first_token_at is None:  # retried
            self._gaps.pop(record.request_id, None)
        self._write("retried", id=record.request_id)

    def on_request_finished(self, record: ServedRequest) -> None:
        _, longest_gap = self._gaps.pop(record.request_id, (0.0, 0.0))
        self._write(
            "ended",
            **self._about(record),
            cached_tokens=record.num_cached_tokens,
            output_tokens=record.num_output_tokens,
            ttft_s=_since(record.started_at, record.first_token_at),
            longest_gap_s=round(longest_gap, 6) if record.num_output_tokens > 1 else None,
            duration_s=_since(record.started_at, record.finished_at),
            retries=record.num_retries,
            finish_reason=record.finish_reason,
            error=record.error,
        )

    def _about(self, record: ServedRequest) -> dict[str, object]:
        """The fields known from a request's start."""
        return {
            "id": record.request_id,
            "time": _text(self._wall_time(record.started_at)),
            "key": record.key,
            "tenant": record.tenant,
            "service_class": record.service_class,
            "endpoint": record.endpoint,
            "model": record.model,
            "prompt_tokens": record.num_prompt_tokens,
        }

    def _wall_time(self, at: float) -> float:
        return time.time() + at - self._clock()

    def _write(self, event: str, **fields: object) -> None:
        try:
            self._lines.put_nowait(msgspec.json.encode({"event": event, **fields}))
        except queue.Full:
            self._writer.num_dropped += 1

    def close(self) -> None:
        """Write the remaining lines, unless the disk hangs."""
        self._write("closed", time=_text(time.time()))
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)


class _Writer:
    """The writing thread's state."""

    def __init__(self, path: Path, lines: queue.Queue[bytes | None]) -> None:
        self._path = path
        self._lines = lines
        self.num_dropped = 0  # lines dropped for lack of room, counted by the other thread
        self._num_failed = 0
        self._num_reported = 0  # of dropped and failed lines
        self._is_failing = False
        try:
            self._file = LineFile(path, "ab")
        except OSError as error:
            raise InvalidInput(
                f"Got --request-log {str(path)!r} but it cannot be written: {error.strerror}."
            ) from error

    def run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write(line)
            except OSError as error:
                self._num_failed += 1
                if not self._is_failing:
                    logger.error("Lines of the request log %s are lost: %s.", self._path, error.strerror)
                self._is_failing = True
        self._file.close()

    def _write(self, line: bytes) -> None:
        if not self._file.is_at(self._path):
            moved, self._file = self._file, LineFile(self._path, "ab")
            moved.close()
        if num_lost := self.num_dropped + self._num_failed - self._num_reported:
            self._file.write(msgspec.json.encode({"event": "lost", "lines": num_lost}))
            logger.warning("The request log %s is written again; %d lines were lost.", self._path, num_lost)
            self._num_reported += num_lost
            self._is_failing = False
        self._file.write(line)


def _text(wall_time: float) -> str:
    return datetime.fromtimestamp(wall_time, UTC).isoformat(timespec="milliseconds")


def _since(start: float, at: float | None) -> float | None:
    return None if at is None else round(at - start, 6)
