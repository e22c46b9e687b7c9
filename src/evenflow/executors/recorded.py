"""Replays a recording: a fresh scheduler gets its events and results; a plan that differs is a change of behaviour."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.request import FinishReason, RequestRecord
from evenflow.errors import EngineFailed, InvalidInput
from evenflow.executors.record import Record, read, read_header, read_policy


def replay(path: str | Path) -> list[StepPlan]:
    """Plan a recorded run again; raises EngineFailed at the first plan that differs."""
    header, *events = _read_lines(path)
    scheduler = read_header(header)
    recorded_plans = (read(event["plan"], StepPlan) for event in events if event["event"] == "step")
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
                    _check_same(plan, next(recorded_plans, None))
                    plans.append(plan)
            case "step":
                scheduler.commit(read(event["result"], StepResult), event["now"])
    return plans


def _check_same(plan: StepPlan, recorded: StepPlan | None) -> None:
    if recorded is None:
        raise EngineFailed(f"step {plan.step_id} was planned after the recording's last")
    differing = [field.name for field in fields(plan) if getattr(plan, field.name) != getattr(recorded, field.name)]
    if differing:
        raise EngineFailed(f"step {plan.step_id} differs from the recording in {', '.join(differing)}")


def _read_lines(path: str | Path) -> list[Record]:
    with open(path, encoding="utf-8") as file:
        try:
            records = [json.loads(line) for line in file]
        except json.JSONDecodeError as error:
            raise InvalidInput(f"{path} is not a recording: {error}") from error
    if not records:
        raise InvalidInput(f"{path} is empty, a recording has a header at least")
    return records
