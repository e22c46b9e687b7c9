"""Recordings: a scheduler's calls as JSON lines, and their replay by a fresh scheduler.

A plan that differs from the recorded one is a change of behaviour. Readers refuse unknown versions.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.request import FinishReason, RequestRecord
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.service_classes import Classes
from evenflow.core.step_time import StepTimeModel
from evenflow.core.tier import TierConfig
from evenflow.errors import EngineFailed, InvalidInput

VERSION = 4
Record = dict[str, Any]
Kind = TypeVar("Kind")

write_line = msgspec.json.Encoder().encode


def read(record: object, kind: type[Kind]) -> Kind:
    """Decode a plan, result, request or similar from a line's record."""
    return msgspec.convert(record, kind, str_keys=True)


def header_record(scheduler: Scheduler) -> Record:
    """The scheduler's initial state: its settings and learned step times."""
    return {
        "version": VERSION,
        "scheduler": asdict(scheduler.config) | policy_record(scheduler.config.policy),
        "caps": scheduler.caps,
        "step_time": scheduler.step_time.to_record(),
    }


def read_header(record: Record) -> Scheduler:
    if record.get("version") != VERSION:
        raise InvalidInput(f"Got a recording of version {record.get('version')!r} but expected {VERSION}.")
    settings = dict(record["scheduler"])
    settings["policy"] = read_policy(settings)
    settings["classes"] = read(settings["classes"], Classes)
    if settings.get("tier") is not None:
        settings["tier"] = read(settings["tier"], TierConfig)
    del settings["max_num_batched_tokens"]
    step_time = StepTimeModel.from_record(record["step_time"])
    return Scheduler(SchedulerConfig(**settings), read(record["caps"], ExecutorCaps), step_time=step_time)


def policy_record(policy: PolicySpec) -> Record:
    return {"policy": str(policy), "max_num_batched_tokens": policy.budget}


def read_policy(record: Record) -> PolicySpec:
    return PolicySpec.parse(record["policy"]).bounded(record["max_num_batched_tokens"])


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
