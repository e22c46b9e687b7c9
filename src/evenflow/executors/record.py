"""The record format: a scheduler's calls as JSON lines, and back, so that the same run can be planned again.

Readers refuse a version that they do not know.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidInput

VERSION = 2
Record = dict[str, Any]
Kind = TypeVar("Kind")

write_line = msgspec.json.Encoder().encode


def read(record: object, kind: type[Kind]) -> Kind:
    """A plan, result, request or the like, from what a line holds of it."""
    return msgspec.convert(record, kind, str_keys=True)


def header_record(scheduler: Scheduler) -> Record:
    """The scheduler as it starts: its settings, and what it knows of step times."""
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
    del settings["max_num_batched_tokens"]
    step_time = StepTimeModel.from_record(record["step_time"])
    return Scheduler(SchedulerConfig(**settings), read(record["caps"], ExecutorCaps), step_time=step_time)


def policy_record(policy: PolicySpec) -> Record:
    return {"policy": str(policy), "max_num_batched_tokens": policy.budget}


def read_policy(record: Record) -> PolicySpec:
    return PolicySpec.parse(record["policy"]).bounded(record["max_num_batched_tokens"])
