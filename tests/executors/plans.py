"""Plans made by hand, for executors that run a tiny random model."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from evenflow.core.plan import Admission, BlockTableChange, Chunk, ChunkReason, Decodes, StepPlan, StepResult
from evenflow.core.request import SamplingParams
from evenflow.executors.base import Executor

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def prompt(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(3, 128, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def admit(slot: int, token_ids: tuple[int, ...], sampling: SamplingParams = GREEDY, **changes: Any) -> Admission:
    fields: dict[str, Any] = {
        "request_id": f"r{slot}",
        "epoch": 0,
        "slot": slot,
        "token_ids": token_ids,
        "num_prompt_tokens": len(token_ids),
        "num_cached_tokens": 0,
        "max_known_tokens": len(token_ids) + 64,
        "sampling": sampling,
        "seed": 7,
        "stop_token_ids": frozenset({2}),
    }
    return Admission(**{**fields, **changes})


def blocks(slot: int, first_id: int, count: int = 32, first: int = 0) -> BlockTableChange:
    return BlockTableChange(slot, first, tuple(range(first_id, first_id + count)))


def chunk(slot: int, start: int, end: int, samples: bool, prompt_logprobs: bool = False) -> Chunk:
    reason = ChunkReason.END_OF_PROMPT if samples else ChunkReason.BUDGET
    return Chunk(f"r{slot}", 0, slot, start, end - start, reason, samples, prompt_logprobs)


def decodes(*slots_and_positions: tuple[int, int]) -> Decodes:
    slots = tuple(slot for slot, _ in slots_and_positions)
    ids = tuple(f"r{slot}" for slot in slots)
    return Decodes(ids, (0,) * len(slots), slots, tuple(position for _, position in slots_and_positions))


def plan(
    step_id: int = 0,
    *,
    released: tuple[int, ...] = (),
    admissions: tuple[Admission, ...] = (),
    changes: tuple[BlockTableChange, ...] = (),
    decoding: Decodes | None = None,
    chunks: tuple[Chunk, ...] = (),
) -> StepPlan:
    return StepPlan(step_id, released, admissions, changes, decoding or Decodes(), chunks, 0)


def run(executor: Executor, step: StepPlan) -> StepResult:
    executor.submit(step)
    return executor.wait()


def generate(executor: Executor, admission: Admission, cuts: tuple[int, ...], count: int) -> list[int]:
    """The first `count` tokens of a request alone, its prompt in chunks that end at `cuts`."""
    slot, length = admission.slot, len(admission.token_ids)
    bounds = [admission.num_cached_tokens, *cuts, length]
    tokens: list[int] = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        step = plan(
            admissions=(admission,) if number == 0 else (),
            changes=(blocks(slot, 0),) if number == 0 else (),
            chunks=(chunk(slot, start, end, samples=end == length),),
        )
        tokens += run(executor, step).tokens[0]
    for position in range(length, length + count - 1):
        tokens += run(executor, plan(decoding=decodes((slot, position)))).tokens[0]
    run(executor, plan(released=(slot,)))
    return tokens
