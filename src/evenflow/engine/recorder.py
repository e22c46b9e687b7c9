"""Records a run as JSON lines: every call of the scheduler, and every step's plan with its seconds.

The first line is the header; then come, in the order they happened:
    {"event": "add", "request": ...}
    {"event": "finish", "id": ..., "reason": ..., "keep": ...}
    {"event": "policy", "policy": ..., "max_num_batched_tokens": ...}      from the next plan on
    {"event": "schedule", "now": ...}                       with or without a plan as the result
    {"event": "step", "now": ..., "seconds": ..., "plan": ..., "result": ...}      a step was committed
"""

from __future__ import annotations

import io
import itertools
import logging
import os
from contextlib import suppress
from pathlib import Path

from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Request
from evenflow.core.scheduler import Scheduler
from evenflow.errors import InvalidInput
from evenflow.executors.recorded import Record, header_record, policy_record, write_line

logger = logging.getLogger("evenflow")


def open_private(path: str | Path) -> io.FileIO:
    """An empty recording. It holds what people asked, so a new file is for its owner alone."""
    return open(path, "wb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o600))


class Recorder:
    """An open recording. Lines are complete at any moment: the recording of a run that dies can be read.

    A write that fails ends the recording, not the run.
    """

    def __init__(self, path: str | Path, scheduler: Scheduler) -> None:
        try:
            self._path = path
            self._file: io.RawIOBase = open_private(path)
        except OSError as error:
            raise InvalidInput(f"Got --record {str(path)!r} but it cannot be written: {error.strerror}.") from error
        self._num_bytes = 0  # of whole lines
        self._has_failed = False
        self._write(header_record(scheduler))

    def added(self, request: Request) -> None:
        self._write({"event": "add", "request": request.record()})

    def ended(self, request_id: str, reason: FinishReason, keep: int | None) -> None:
        self._write({"event": "finish", "id": request_id, "reason": reason, "keep": keep})

    def policy_set(self, policy: PolicySpec) -> None:
        self._write({"event": "policy", **policy_record(policy)})

    def asked_for_plan(self, now: float) -> None:
        self._write({"event": "schedule", "now": now})

    def committed(self, plan: StepPlan, result: StepResult, now: float) -> None:
        self._write({"event": "step", "now": now, "seconds": result.seconds, "plan": plan, "result": result})

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()

    def _write(self, record: Record) -> None:
        if self._has_failed:
            return
        line = memoryview(write_line(record) + b"\n")
        start = 0
        try:
            while start < len(line):
                start += self._file.write(line[start:]) or 0
            self._num_bytes += len(line)
        except OSError as error:  # the disk is full, for example: serving goes on
            self._has_failed = True
            with suppress(OSError):
                self._file.truncate(self._num_bytes)  # to the last whole line
            logger.error("Recording to %s stops after %d bytes: %s.", self._path, self._num_bytes, error.strerror)


def next_recording(path: Path) -> Path:
    """This file if nothing is in it, else the first of name-2, name-3 and so on that does not exist."""
    if not path.exists() or not path.stat().st_size:
        return path
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in numbered if not one.exists())
