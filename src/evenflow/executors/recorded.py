"""Runs nothing: gives back the results of a recording, and checks that the plans are the ones recorded.

`replay` drives a fresh scheduler through a recording's events; a plan that differs is a change of behaviour.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult
from evenflow.core.request import FinishReason, RequestRecord
from evenflow.errors import EngineFailed, InvalidInput
from evenflow.executors.record import Record, read, read_header, read_policy


class RecordedExecutor:
    """Implements `Executor` over the `step` events of a recording."""

    def __init__(self, steps: Iterable[Record], caps: ExecutorCaps) -> None:
        self.caps = caps
        self._steps = deque(steps)
        self._submitted: deque[Record] = deque()

    def submit(self, plan: StepPlan) -> None:
        if not self._steps:
            raise EngineFailed(f"step {plan.step_id} was planned after the recording's last")
        recorded = self._steps.popleft()
        expected = read(recorded["plan"], StepPlan)
        differing = [field.name for field in fields(plan) if getattr(plan, field.name) != getattr(expected, field.name)]
        if differing:
            raise EngineFailed(f"step {plan.step_id} differs from the recording in {', '.join(differing)}")
        self._submitted.append(recorded)

    def wait(self) -> StepResult:
        return read(self._submitted.popleft()["result"], StepResult)

    def close(self) -> None:
        self._submitted.clear()


def replay(path: str | Path) -> list[StepPlan]:
    """Plan a recorded run again; raises EngineFailed at the first plan that differs."""
    header, *events = _read_lines(path)
    scheduler = read_header(header)
    executor = RecordedExecutor([event for event in events if event["event"] == "step"], scheduler.caps)
    plans: list[StepPlan] = []
    for event in events:
        match event["event"]:
            case "add":
                scheduler.add(read(event["request"], RequestRecord).request())
            case "finish":
                scheduler.finish(event["id"], FinishReason(event["reason"]), event["keep"])
            case "policy":
                scheduler.set_policy(read_policy(event))
            case "schedule":
                plan = scheduler.schedule(event["now"])
                if plan is not None:
                    executor.submit(plan)
                    plans.append(plan)
            case "step":
                scheduler.commit(executor.wait(), event["now"])
    return plans


def _read_lines(path: str | Path) -> list[Record]:
    with open(path, encoding="utf-8") as file:
        try:
            records = [json.loads(line) for line in file]
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{path} is not a recording: {error}") from error
    if not records:
        raise InvalidInput(f"{path} is empty, a recording has a header at least")
    return records
