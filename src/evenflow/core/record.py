"""Requests, plans and results as plain data for JSON, and back.

A recording holds every call of a scheduler: replaying the calls gives the same plans.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from evenflow.core.grammar import Grammar
from evenflow.core.plan import ExecutorCaps, RowLogprobs, StepPlan, StepResult, TokenLogprob
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidInput

VERSION = 1
Record = dict[str, Any]


def header_record(scheduler: Scheduler) -> Record:
    """A scheduler at its start: its settings, and what it has learned of step times."""
    return {
        "version": VERSION,
        "scheduler": asdict(scheduler.config) | policy_record(scheduler.config.policy),
        "caps": asdict(scheduler.caps),
        "step_time": scheduler.step_time.to_record(),
    }


def read_header(record: Record) -> Scheduler:
    if record.get("version") != VERSION:
        raise InvalidInput(f"Got a recording of version {record.get('version')!r} but expected {VERSION}.")
    caps = record["caps"] | {"row_buckets": tuple(record["caps"]["row_buckets"])}
    step_time = StepTimeModel.from_record(record["step_time"])
    settings = record["scheduler"] | {"policy": read_policy(record["scheduler"])}
    del settings["max_num_batched_tokens"]
    return Scheduler(SchedulerConfig(**settings), ExecutorCaps(**caps), step_time=step_time)


def policy_record(policy: PolicySpec) -> Record:
    return {"policy": str(policy), "max_num_batched_tokens": policy.budget}


def read_policy(record: Record) -> PolicySpec:
    return PolicySpec.parse(record["policy"]).bounded(record["max_num_batched_tokens"])


def request_record(request: Request) -> Record:
    """A request as it was added."""
    return {
        "id": request.id,
        "prompt_token_ids": request.tokens[: request.num_prompt_tokens],
        "sampling": asdict(request.sampling),
        "seed": request.seed,
        "max_known_tokens": request.max_known_tokens,
        "stop_token_ids": sorted(request.stop_token_ids),
        "salt": request.salt.hex(),
        "block_hashes": [block_hash.hex() for block_hash in request.block_hashes],
        "arrival_time": request.arrival_time,
    }


def read_request(record: Record) -> Request:
    sampling = dict(record["sampling"])
    if sampling.get("grammar") is not None:
        sampling["grammar"] = Grammar(**sampling["grammar"])
    return Request(
        record["id"],
        record["prompt_token_ids"],
        SamplingParams(**sampling),
        seed=record["seed"],
        max_model_len=record["max_known_tokens"],
        eos_token_ids=tuple(record["stop_token_ids"]),
        salt=bytes.fromhex(record["salt"]),
        block_hashes=[bytes.fromhex(block_hash) for block_hash in record["block_hashes"]],
        arrival_time=record["arrival_time"],
    )


def plan_record(plan: StepPlan) -> Record:
    return {name: _plain(value) for name, value in asdict(plan).items()}


def result_record(result: StepResult) -> Record:
    return {name: _plain(value) for name, value in asdict(result).items()}


def read_result(record: Record) -> StepResult:
    return StepResult(
        step_id=record["step_id"],
        tokens=tuple(tuple(tokens) for tokens in record["tokens"]),
        seconds=record["seconds"],
        errors={int(index): message for index, message in record["errors"].items()},
        logprobs=_read_logprobs(record["logprobs"]),
        prompt_logprobs=_read_logprobs(record["prompt_logprobs"]),
    )


def _plain(value: object) -> object:
    """The value as JSON returns it: lists for tuples and sets, text for keys."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _read_logprobs(record: Record) -> dict[int, tuple[RowLogprobs, ...]]:
    return {
        int(index): tuple(
            RowLogprobs(TokenLogprob(*chosen), tuple(TokenLogprob(*other) for other in top)) for chosen, top in rows
        )
        for index, rows in record.items()
    }
