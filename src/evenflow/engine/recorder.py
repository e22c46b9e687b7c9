"""Records a run as JSON lines: every scheduler call, and every step's plan with its seconds.

The first line is the header; then come, in the order they happened:
    {"event": "add", "request": ...}
    {"event": "finish", "id": ..., "reason": ..., "keep": ...}
    {"event": "policy", "policy": ..., "max_num_batched_tokens": ...}      from the next plan on
    {"event": "schedule", "now": ...}                       with or without a plan as the result
    {"event": "step", "now": ..., "seconds": ..., "plan": ..., "result": ...}      a step was committed
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Request
from evenflow.core.scheduler import Scheduler
from evenflow.errors import InvalidInput
from evenflow.executors.recorded import Record, header_record, policy_record, write_line
from evenflow.line_file import LineFile

logger = logging.getLogger("evenflow")


class Recorder:
    """An open recording. Lines are written whole, so the recording of a crashed run can be read.

    A failed write ends the recording, not the run.
    """

    def __init__(self, path: str | Path, scheduler: Scheduler) -> None:
        try:
            self._path = path
            self._file = LineFile(path, "wb")
        except OSError as error:
            raise InvalidInput(f"Got --record {str(path)!r} but it cannot be written: {error.strerror}.") from error
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
        self._file.close()

    def _write(self, record: Record) -> None:
        if self._has_failed:
            return
        try:
            self._file.write(write_line(record))
        except Exception as error:  # such as a full disk: serving continues
            self._has_failed = True
            num_bytes = self._file.num_bytes
            logger.error(
                "Recording to %s stops after %d bytes: %s.", self._path, num_bytes, getattr(error, "strerror", error)
            )


def next_recording(path: Path) -> Path:
    """This file if it is empty or new, else the first unused of name-2, name-3 and so on."""
    if not path.exists() or not path.stat().st_size:
        return path
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in numbered if not one.exists())
