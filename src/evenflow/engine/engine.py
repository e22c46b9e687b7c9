"""The loop: schedule, run, commit. Tokens in, tokens out; one step fits on a screen.

Only the thread that calls `step` may use it. It knows tokens only: `outputs` turns its reports into text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from evenflow.best_effort import BestEffort
from evenflow.core.outcome import Committed
from evenflow.core.plan import NO_TIER_RESULT, StepPlan, StepResult, TierResult
from evenflow.core.policies import PolicySpec
from evenflow.core.report import (
    NOTHING_MOVED,
    AdmissionReport,
    Attribution,
    ChunkReport,
    Ended,
    StepReport,
    TierReport,
)
from evenflow.core.request import FinishReason, Request
from evenflow.core.scheduler import Scheduler
from evenflow.duration import format_range
from evenflow.engine.gc_timer import GcTimer
from evenflow.engine.intake import Limits
from evenflow.engine.recorder import Recorder
from evenflow.engine.stats import Stats
from evenflow.engine.watchdog import Pulse
from evenflow.errors import DeadlineExceeded, EngineFailed, EvenflowError, InvalidRequest, OutOfMemory
from evenflow.executors.base import Executor
from evenflow.step_time_store import StepTimeKeeper

Value = TypeVar("Value")

_STORE_SECONDS = 2.0  # at the end; an engine that takes much longer to stop is killed

logger = logging.getLogger("evenflow")

# The executor counts as broken after this many consecutive failed steps, as a GPU is after some errors.
_MAX_FAILED_STEPS = 8


@dataclass(slots=True)
class Engine:
    """One scheduler and one executor."""

    scheduler: Scheduler
    executor: Executor
    limits: Limits
    recorder: Recorder | None = None
    clock: Callable[[], float] = time.perf_counter
    has_grammars: bool = False  # the executor can constrain output
    keeper: StepTimeKeeper | None = None  # saves learned step times
    stats: Stats = field(default_factory=Stats)
    pulse: Pulse = field(default_factory=Pulse)  # for a watchdog: the time at which the current step counts as hung
    gc_timer: GcTimer = field(init=False)
    _plans: dict[int, StepPlan] = field(default_factory=dict)  # in flight
    _attribution: Attribution = field(init=False)
    _gc_seconds: float = 0.0  # at the last commit
    _num_failed_steps: int = 0  # consecutive
    _admission_failure: str | None = None
    _moved: TierReport = NOTHING_MOVED  # not reported yet
    _num_recomputed: int = 0  # at the last commit
    _best_effort: BestEffort = field(default_factory=lambda: BestEffort(logger))

    def __post_init__(self) -> None:
        self.gc_timer = GcTimer(self.clock)
        self._attribution = Attribution(self.scheduler.step_time)

    # ---- requests ----

    def add(self, request: Request) -> None:
        if request.sampling.grammar is not None and not self.has_grammars:
            raise InvalidRequest("Got a grammar but this engine cannot constrain output.")
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.added(request)

    def abort(self, request_id: str) -> bool:
        """End a request at any moment. False if it has ended already."""
        return self._finish(request_id, FinishReason.ABORT)

    def stop(self, request_id: str, keep: int) -> bool:
        """End a request at a stop string, keeping its first `keep` output tokens."""
        return self._finish(request_id, FinishReason.STOP, keep)

    def _finish(self, request_id: str, reason: FinishReason, keep: int | None = None) -> bool:
        ended = self.scheduler.finish(request_id, reason, keep)
        if ended and self.recorder is not None:
            self.recorder.ended(request_id, reason, keep)
        return ended

    def expire(self) -> dict[str, DeadlineExceeded]:
        """End requests whose deadlines have passed. Call before each step, which would still give them tokens."""
        expired = self.scheduler.expire(self.clock())
        if self.recorder is not None:
            for request_id in expired:
                self.recorder.ended(request_id, FinishReason.ERROR, None)
        return expired

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def policy(self) -> PolicySpec:
        return self.scheduler.config.policy

    def set_policy(self, policy: PolicySpec) -> None:
        """Change the policy from the next step on. Learned step times stay."""
        self.scheduler.set_policy(policy)
        if self.recorder is not None:
            self.recorder.policy_set(policy)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the shares of tenants from the next step on."""
        self.scheduler.set_tenant_weights(weights)

    def set_target(self, target: float | str | None, paced: bool | None = None) -> None:
        """Change the target from the next step on, paced as before unless stated; None: no target."""
        self.set_policy(self.policy.with_target(target, paced))

    # ---- the loop ----

    def step(self) -> StepReport | None:
        """Keep the executor busy, wait for the oldest step and report it; None if there is no work."""
        with self.pulse.beat(self.clock):
            return self._step()

    def _step(self) -> StepReport | None:
        while self.scheduler.can_schedule and (plan := self._schedule()) is not None:
            self._plans[plan.step_id] = plan
            self.executor.submit(plan)
        if not self._plans:
            if self.scheduler.requests:
                raise EngineFailed(f"no step can be planned for {len(self.scheduler.requests)} unfinished requests")
            return None
        self.pulse.extend(self.scheduler.upper_seconds_in_flight)
        report = self._commit(self._wait())
        if not self.has_work:
            self._best_effort.run("the line of figures", self.stats.idle, None)
        return report

    def _schedule(self) -> StepPlan | None:
        now = self.clock()
        if self.recorder is not None:
            self.recorder.asked_for_plan(now)
        plan = self.scheduler.schedule(now)
        if (feasible := self.scheduler.policy.infeasibility_warning()) is not None:
            logger.warning(
                "Policy %s is infeasible: with the streams that decode now, a step takes longer even with the least "
                "prefill. The lowest feasible target is estimated at %s. Prefill continues at its minimum.",
                self.policy,
                format_range(*feasible),
            )
        return plan

    def _wait(self) -> StepResult:
        plan, tier = self._plans.pop(next(iter(self._plans))), NO_TIER_RESULT
        try:
            result = self.executor.wait()
            tier = result.tier
            if result.step_id != plan.step_id or len(result.tokens) != plan.num_sequences:
                raise EngineFailed(f"the executor gave {len(result.tokens)} results for {plan.num_sequences} sequences")
        except Exception as error:  # its requests are recomputed, the others continue
            self._num_failed_steps += not isinstance(error, OutOfMemory)
            logger.exception("step %d failed", plan.step_id)
            message = str(error) or type(error).__name__
            if self._num_failed_steps == _MAX_FAILED_STEPS:
                raise EngineFailed(f"{_MAX_FAILED_STEPS} steps failed in a row, the last by: {message}") from error
            return failed_result(plan, message, out_of_memory=isinstance(error, OutOfMemory), tier=tier)
        self._num_failed_steps = 0
        return result

    def _commit(self, result: StepResult) -> StepReport:
        now = self.clock()
        committed = self.scheduler.commit(result, now)
        if self.recorder is not None:
            self.recorder.committed(committed.plan, result, now)
        if self.keeper is not None:
            self._best_effort.run("keeping step times", partial(self.keeper.after_step, now), None)
        if result.out_of_memory and committed.retried:
            scheduler = self.scheduler
            logger.warning(
                "Memory ran out. From now on a step has at most %d tokens, and the KV cache %d blocks.",
                *(scheduler.policy.max_step_tokens, scheduler.pool.num_blocks),
            )
        self._check_admission()
        self._count_moves(result.tier)
        report = self._report(committed, now)
        if not report.is_empty:
            self._best_effort.run("the line of figures", partial(self.stats.observe, report), None)
            self._moved = NOTHING_MOVED
        return report

    def _count_moves(self, result: TierResult) -> None:
        if (tier := self.scheduler.tier) is not None:
            before, self._num_recomputed = self._num_recomputed, self.scheduler.num_recomputed_blocks
            self._moved = self._moved.then(result, self._num_recomputed - before, tier.num_stored)

    def _check_admission(self) -> None:
        before, self._admission_failure = self._admission_failure, self.scheduler.admission_failure()
        if self._admission_failure is not None and before is None:
            logger.error("The scheduler is stuck: %s. Please report this as a bug.", self._admission_failure)

    def _report(self, committed: Committed, now: float) -> StepReport:
        plan, result, scheduler = committed.computed, committed.result, self.scheduler
        num_decodes = len(plan.decodes)
        given = [(request.id, sequence, tokens) for request, sequence, tokens in committed.emissions if tokens]
        num_decoded = sum(1 for _, sequence, _ in given if sequence < num_decodes)
        sampled = {sequence for _, sequence, _ in given[num_decoded:]}
        failed = [request.id for request in committed.finished if request.error is not None]
        ids = [request_id for request_id, _, _ in given] + failed
        report = StepReport(
            step_id=plan.step_id,
            at=now,
            seconds=result.seconds,
            predicted_seconds=committed.predicted_seconds,
            decode_seconds=0.0,
            num_decodes=num_decodes,
            chunks=[
                ChunkReport(
                    chunk.request_id,
                    chunk.start,
                    chunk.length,
                    chunk.reason,
                    seconds=0.0,
                    gave_token=place in sampled,
                    num_shed=planned.length - chunk.length,
                )
                for place, (planned, chunk) in enumerate(
                    zip(committed.plan.chunks, plan.chunks, strict=True), num_decodes
                )
            ],
            admissions=[
                AdmissionReport(one.request_id, len(one.token_ids), one.num_cached_tokens, one.epoch > 0)
                for one in plan.admissions
            ],
            causes=(),
            late=committed.late,
            policy=str(self.policy),
            budget=scheduler.policy.max_step_tokens,
            target_s=self.policy.target,
            feasible_target_s=scheduler.policy.feasible_target,
            num_running=scheduler.num_running,
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=1 - scheduler.pool.num_free / scheduler.pool.num_blocks,
            ids=ids,
            tokens=[tokens for _, _, tokens in given] + [()] * len(failed),
            num_decoded=num_decoded,
            ended={ids.index(one.id): Ended(one.finish_reason or "", one.error) for one in committed.finished},
            logprobs=_by_row(given, result.logprobs),
            embeddings=_by_row(given, result.embeddings),
            prompt_logprobs={place - num_decodes: rows for place, rows in result.prompt_logprobs.items()},
            retried=tuple([request.id for request in committed.retried]),
            admission_failure=self._admission_failure,
            tier=self._moved if scheduler.tier is not None and plan.num_sequences else None,
        )
        shapes = [committed.averaged.shape(scheduler.caps, num_chunks) for num_chunks in range(len(plan.chunks))]
        gc_seconds, self._gc_seconds = self.gc_timer.seconds - self._gc_seconds, self.gc_timer.seconds
        return self._attribution.split(report, [*shapes, committed.shape], gc_seconds)

    def close(self) -> None:
        if (tier := self.scheduler.config.tier) is not None and tier.keeps_all:
            self._store_prefixes()
        self.executor.close()
        if self.recorder is not None:
            self.recorder.close()
        if self.keeper is not None:
            self._best_effort.run("keeping step times", self.keeper.save, None)

    def _store_prefixes(self) -> None:
        """End open requests, and give the tier a few seconds to finish its saves."""
        until = self.clock() + _STORE_SECONDS
        for request_id in list(self.scheduler.requests):
            self.scheduler.abort(request_id)
        try:
            while self.has_work and self.clock() < until:
                self.step()
        except EvenflowError:
            logger.exception("not all prefixes were stored")


def failed_result(
    plan: StepPlan, message: str, *, out_of_memory: bool = False, tier: TierResult = NO_TIER_RESULT
) -> StepResult:
    """The result of a step that lost all its rows."""
    faults = dict.fromkeys(range(plan.num_sequences), message)
    tokens = ((),) * plan.num_sequences
    return StepResult(plan.step_id, tokens, 0.0, faults=faults, out_of_memory=out_of_memory, tier=tier)


def _by_row(given: Sequence[tuple[str, int, tuple[int, ...]]], found: Mapping[int, Value]) -> dict[int, Value]:
    """Sparse results of sequences, keyed by their rows in the report."""
    return {row: found[sequence] for row, (_, sequence, _) in enumerate(given) if sequence in found} if found else {}
