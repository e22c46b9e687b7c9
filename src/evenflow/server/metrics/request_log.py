"""The request log: a JSON line for each request that ended, without its text.

A thread writes the lines, so a slow disk delays no stream. If it is full, lines are lost and serving goes on.
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

from evenflow.core.report import StepReport
from evenflow.errors import InvalidInput
from evenflow.line_file import LineFile
from evenflow.server.metrics.observer import Listener, Observer, RequestRecord

logger = logging.getLogger("evenflow")

_MAX_PENDING = 10_000  # lines that wait for the disk
_CLOSE_S = 2.0  # for the last lines


class RequestLog(Listener):
    """Appends to a file, and starts a new one after the file was renamed or deleted."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self._open_requests = observer.requests
        self._clock = observer.clock
        self._gaps: dict[str, tuple[float, float]] = {}  # when the last token came, and the longest gap so far
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_PENDING)
        self._writer = _Writer(path, self._lines)
        self._thread = threading.Thread(target=self._writer.run, name="evenflow-request-log", daemon=True)
        self._thread.start()
        observer.listen(self)

    def on_step(self, report: StepReport) -> None:
        gaps, now = self._gaps, report.at
        for request_id, tokens in zip(report.ids, report.tokens, strict=True):
            if tokens and request_id in self._open_requests:
                last, longest = gaps.get(request_id, (now, 0.0))
                gaps[request_id] = now, max(longest, now - last)

    def on_request_finished(self, record: RequestRecord) -> None:
        _, longest_gap = self._gaps.pop(record.request_id, (0.0, 0.0))
        arrived = datetime.fromtimestamp(time.time() + record.started_at - self._clock(), UTC)
        line = {
            "id": record.request_id,
            "time": arrived.isoformat(timespec="milliseconds"),
            "key": record.key,
            "tenant": record.tenant,
            "service_class": record.service_class,
            "endpoint": record.endpoint,
            "model": record.model,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "ttft_s": _since(record.started_at, record.first_token_at),
            "longest_gap_s": round(longest_gap, 6) if record.num_output_tokens > 1 else None,
            "duration_s": _since(record.started_at, record.finished_at),
            "finish_reason": record.finish_reason,
        }
        try:
            self._lines.put_nowait(msgspec.json.encode(line))
        except queue.Full:
            self._writer.num_dropped += 1

    def close(self) -> None:
        """Write what is left, unless the disk hangs."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)


class _Writer:
    """The thread's part."""

    def __init__(self, path: Path, lines: queue.Queue[bytes | None]) -> None:
        self._path = path
        self._lines = lines
        self.num_dropped = 0  # lines that found no room, counted by the other thread
        self._num_failed = 0
        self._num_reported = 0  # of both
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
        self._file.write(line)
        if num_lost := self.num_dropped + self._num_failed - self._num_reported:
            logger.warning("The request log %s is written again; %d lines were lost.", self._path, num_lost)
            self._num_reported += num_lost
            self._is_failing = False


def _since(start: float, at: float | None) -> float | None:
    return None if at is None else round(at - start, 6)
