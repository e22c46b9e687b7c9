"""Records a run as JSON lines: every call of the scheduler, and every step's plan with its seconds.

The first line is the header; then come, in the order they happened:
    {"event": "add", "request": ...}
    {"event": "finish", "id": ..., "reason": ..., "keep": ...}
    {"event": "policy", "policy": ..., "max_num_batched_tokens": ...}      from the next plan on
    {"event": "schedule", "now": ...}                       with or without a plan as the result
    {"event": "step", "now": ..., "seconds": ..., "plan": ..., "result": ...}      a step was committed
"""

from __future__ import annotations

from pathlib import Path

from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, Request
from evenflow.core.scheduler import Scheduler
from evenflow.errors import InvalidInput
from evenflow.executors.recorded import Record, header_record, policy_record, write_line


class Recorder:
    """An open recording. Lines are complete at any moment: the recording of a run that dies can be read."""

    def __init__(self, path: str | Path, scheduler: Scheduler) -> None:
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise InvalidInput(f"Got --record {str(path)!r} but it cannot be written: {error.strerror}.") from error
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
        self._file.write(write_line(record) + b"\n")
