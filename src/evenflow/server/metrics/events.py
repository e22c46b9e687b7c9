"""What the engine process tells of each step, as one small message: all that metrics, traces and the page are made of.

Must not know: sockets, HTTP, Prometheus. Times are of `time.perf_counter`, which all processes of a machine share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from evenflow.core.scheduler import Committed
    from evenflow.engine.engine import Engine
    from evenflow.engine.stalls import Stall


class EngineState(msgspec.Struct, frozen=True, array_like=True):
    """What changes with the engine process, not with its steps."""

    is_up: bool
    num_restarts: int = 0
    max_model_len: int = 0  # 0: not known yet
    num_blocks: int = 0
    block_size: int = 0
    policy: str = ""  # that the next step is planned by; steps in between say what it was for them


class ChunkEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    request_id: str
    start: int
    length: int
    reason: str
    seconds: float  # of the step's own
    gave_token: bool


class AdmissionEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that took a slot, for the first time or again."""

    request_id: str
    num_tokens: int  # looked up in the prefix cache
    num_cached_tokens: int
    was_preempted: bool


class CauseEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    kind: str  # a CauseKind
    seconds: float
    request_id: str | None = None  # whose chunk it was
    num_tokens: int = 0


class StallEvent(msgspec.Struct, frozen=True, array_like=True):
    """The longest gap that this step made too long."""

    request_id: str
    gap_s: float
    late_s: float
    causes: list[CauseEvent]  # largest first; they add up to the gap


class StepEvent(msgspec.Struct, frozen=True, array_like=True):
    """One committed step."""

    step_id: int
    at: float  # the clock at its commit
    seconds: float
    predicted_seconds: float  # 0: nothing was known yet
    decode_seconds: float  # what is left of `seconds` besides the chunks'
    num_decodes: int
    decoded: list[str]  # requests whose decode gave a token: all of them, but for those aborted meanwhile
    chunks: list[ChunkEvent]
    admissions: list[AdmissionEvent]
    budget: int  # most tokens of a step
    num_output_tokens: int
    num_late_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1
    policy: str
    target_s: float | None  # None: the policy keeps none
    feasible_target_s: float | None  # the least that could be kept, where the target cannot
    stall: StallEvent | None

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def started_at(self) -> float:
        return self.at - self.seconds


def step_event(engine: Engine, committed: Committed, now: float) -> StepEvent:
    """Tell of a step, after the `engine.step()` that committed it at `now`: `Engine.watch_step` is handed both."""
    plan, scheduler, policy = committed.plan, engine.scheduler, engine.scheduler.policy
    num_decodes = len(plan.decodes)
    gave = {sequence: len(tokens) for _, sequence, tokens in committed.emissions if tokens}
    ids = plan.decodes.request_ids
    decoded = [ids[sequence] for sequence in gave if sequence < num_decodes]
    decode_seconds, *chunk_seconds = _parts(engine, committed)
    return StepEvent(
        step_id=plan.step_id,
        at=now,
        seconds=committed.result.seconds,
        predicted_seconds=committed.predicted_seconds,
        decode_seconds=decode_seconds,
        num_decodes=num_decodes,
        decoded=decoded,
        chunks=[
            ChunkEvent(chunk.request_id, chunk.start, chunk.length, chunk.reason.value, seconds, sequence in gave)
            for sequence, (chunk, seconds) in enumerate(zip(plan.chunks, chunk_seconds, strict=True), num_decodes)
        ],
        admissions=[
            AdmissionEvent(one.request_id, len(one.token_ids), one.num_cached_tokens, one.epoch > 0)
            for one in plan.admissions
        ],
        budget=policy.max_step_tokens,
        num_output_tokens=sum(gave.values()),
        num_late_tokens=len(committed.late),
        num_running=scheduler.num_running,
        num_waiting=len(scheduler.waiting),
        kv_cache_usage=engine.stats.kv_cache_usage,
        policy=scheduler.config.policy,
        target_s=policy.pacing.target if policy.pacing is not None else None,
        feasible_target_s=policy.feasible_target,
        stall=_stall_event(engine.stalls.latest),
    )


def _parts(engine: Engine, committed: Committed) -> list[float]:
    """The step's seconds shared out among its decodes and each of its chunks, as predicted; before that, by rows."""
    plan, seconds = committed.plan, committed.result.seconds
    if not plan.chunks:
        return [seconds]
    parts = engine.stalls.predicted_parts(plan)
    if not any(parts):
        parts = [float(len(plan.decodes)), *(float(chunk.length) for chunk in plan.chunks)]
    if not plan.decodes:  # a step costs something even without rows, and these are all it was for
        parts = [0.0, parts[0] + parts[1], *parts[2:]]
    scale = seconds / sum(parts)
    return [scale * part for part in parts]


def _stall_event(stall: Stall | None) -> StallEvent | None:
    if stall is None:
        return None
    causes = [CauseEvent(cause.kind.value, *cause[1:]) for cause in stall.causes]
    return StallEvent(stall.request_id, stall.gap_s, stall.late_s, causes)
