"""The loop: schedule, run, commit. One step fits on a screen.

`prepare` may be called from any thread; everything else belongs to the one thread that steps.
Must not know: torch, files, networks; time comes from the clock it is given.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from evenflow.config import DEFAULT_TARGET_BUDGET
from evenflow.core.grammar import Grammar
from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.policies import retarget
from evenflow.core.request import FinishReason, Request, SamplingParams
from evenflow.core.scheduler import Committed, Scheduler
from evenflow.engine.gc_timer import GcTimer
from evenflow.engine.intake import Intake, Limits, TextCodec
from evenflow.engine.outputs import Delta, OutputBuilder, RequestOutput
from evenflow.engine.recorder import Recorder
from evenflow.engine.stalls import StallLog
from evenflow.engine.stats import Stats
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.executors.base import Executor

logger = logging.getLogger("evenflow")

_STEPS_TO_WARN = 16  # for fewer a target may seem out of reach by a hiccup, or while costs are being learned


@dataclass(slots=True)
class Engine:
    """One scheduler, one executor, and the outputs of the requests they are working on."""

    scheduler: Scheduler
    executor: Executor
    limits: Limits
    codec: TextCodec | None = None  # None: tokens in, tokens out
    recorder: Recorder | None = None
    clock: Callable[[], float] = time.perf_counter
    seed: int | None = None
    check_grammar: Callable[[Grammar], None] | None = None  # None: answers cannot be constrained
    _builders: dict[str, OutputBuilder] = field(default_factory=dict)
    _plans: dict[int, StepPlan] = field(default_factory=dict)  # in flight
    intake: Intake = field(init=False)
    stats: Stats = field(init=False)
    stalls: StallLog = field(init=False)
    watch_step: Callable[[Committed, float], None] = lambda committed, now: None  # told of every step, for benchmarks
    _hopeless_policies: set[str] = field(default_factory=set)  # that the log was told of
    _infeasible_steps: int = 0  # with prefill, in a row

    def __post_init__(self) -> None:
        self.intake = Intake(
            self.limits, self.scheduler.block_size, self.codec, self.clock, self.seed, self.check_grammar
        )
        self.stats = Stats(self.scheduler)
        self.stalls = StallLog(self.scheduler.step_time, self.scheduler.caps, GcTimer(self.clock))

    # ---- requests ----

    def prepare(
        self, prompt: str | Sequence[int], sampling: SamplingParams, *, request_id: str | None = None, tenant: str = ""
    ) -> Request:
        """Check and tokenise a request, and hash its blocks, on the caller's thread."""
        policy = self.scheduler.config.policy
        return self.intake.prepare(prompt, sampling, policy=policy, request_id=request_id, tenant=tenant)

    def add(self, request: Request) -> None:
        if request.sampling.grammar is not None and self.check_grammar is None:
            raise InvalidRequest("Got a grammar but this engine cannot constrain answers.")
        prompt = list(request.tokens)
        self.scheduler.add(request)
        if self.recorder is not None:
            self.recorder.added(request)
        decoder = self.codec.stream_decoder(prompt) if self.codec is not None else None
        output = RequestOutput(request.id, prompt)
        self._builders[request.id] = OutputBuilder(output, decoder, request.sampling.stop, request.arrival_time)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at any moment; None if it is not here (any more)."""
        if not self._finish(request_id, FinishReason.ABORT):
            return None
        builder = self._builders.pop(request_id)
        builder.finish(FinishReason.ABORT, None)
        return builder.output

    def stop(self, request_id: str, keep: int) -> None:
        """End a request in whose text the caller found a stop string, after so many of its output tokens."""
        if self._finish(request_id, FinishReason.STOP, keep):
            del self._builders[request_id]

    def _finish(self, request_id: str, reason: FinishReason, keep: int | None = None) -> bool:
        ended = self.scheduler.finish(request_id, reason, keep)
        if ended and self.recorder is not None:
            self.recorder.ended(request_id, reason, keep)
        return ended

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def set_policy(self, policy: str, max_num_batched_tokens: int) -> None:
        """Plan by another policy from the next step on."""
        self.scheduler.set_policy(policy, max_num_batched_tokens)
        self._infeasible_steps = 0
        if self.recorder is not None:
            self.recorder.policy_set(policy, max_num_batched_tokens)

    def set_target(self, seconds: float, paced: bool | None = None) -> None:
        """Keep another target from the next step on; None: paced or strict as before. What was learned stays."""
        old = self.scheduler.config
        has_target = self.scheduler.policy.pacing is not None
        budget = old.max_num_batched_tokens if has_target else DEFAULT_TARGET_BUDGET
        self.set_policy(retarget(old.policy, seconds, paced), budget)

    # ---- the loop ----

    def step(self) -> list[Delta]:
        """Keep the executor busy, wait for the oldest step, and say what it gave."""
        while self.scheduler.can_schedule and (plan := self._schedule()) is not None:
            self._plans[plan.step_id] = plan
            self.executor.submit(plan)
        if not self._plans:
            if self.scheduler.requests:
                raise EngineFailed(f"no step can be planned for {len(self.scheduler.requests)} unfinished requests")
            return []
        deltas = self._commit(self._wait())
        if not self.has_work:
            self.stats.idle()
        return deltas

    def _schedule(self) -> StepPlan | None:
        now = self.clock()
        if self.recorder is not None:
            self.recorder.asked_for_plan(now)
        plan = self.scheduler.schedule(now)
        if plan is not None and plan.chunks:
            self._warn_of_target()
        return plan

    def _warn_of_target(self) -> None:
        """Say once that the target cannot be kept, and which could."""
        feasible, policy = self.scheduler.policy.feasible_target, self.scheduler.config.policy
        self._infeasible_steps = 0 if feasible is None else self._infeasible_steps + 1
        if feasible is None or self._infeasible_steps < _STEPS_TO_WARN or policy in self._hopeless_policies:
            return
        self._hopeless_policies.add(policy)
        logger.warning(
            "Policy %s cannot be kept: with the streams that decode now, a step takes %.0f ms even with the least "
            "prefill. A target of %.0f ms could be. Prefill goes on at its least.",
            policy,
            1000 * feasible,
            math.ceil(1000 * feasible),
        )

    def _wait(self) -> StepResult:
        plan = self._plans.pop(next(iter(self._plans)))
        try:
            return self.executor.wait()
        except Exception as error:  # the step is lost; whoever was in it gets an answer, the others go on
            logger.exception("step %d failed", plan.step_id)
            message = str(error) or type(error).__name__
            tokens = ((),) * plan.num_sequences
            return StepResult(plan.step_id, tokens, 0.0, errors=dict.fromkeys(range(plan.num_sequences), message))

    def _commit(self, result: StepResult) -> list[Delta]:
        now = self.clock()
        committed = self.scheduler.commit(result, now)
        if self.recorder is not None:
            self.recorder.committed(committed.plan, result, now)
        self.stats.observe(committed, now)
        self.watch_step(committed, now)
        self.stalls.observe(committed, now)
        return self._deltas(committed, now)

    def _deltas(self, committed: Committed, now: float) -> list[Delta]:
        plan, result = committed.plan, committed.result
        num_decodes = len(plan.decodes)
        for admission in plan.admissions:
            if admission.request_id in self._builders:
                self._builders[admission.request_id].output.num_cached_tokens = admission.num_cached_tokens
        deltas = []
        for request, sequence, tokens in committed.emissions:
            builder = self._builders[request.id]
            if sequence >= num_decodes:
                builder.take_chunk(plan.chunks[sequence - num_decodes], result.prompt_logprobs.get(sequence))
            if tokens:
                stop_tokens = request.stop_token_ids if request.finish_reason is FinishReason.STOP else frozenset()
                text, stopped = builder.take_tokens(tokens, result.logprobs.get(sequence), stop_tokens, now)
                if stopped and self._finish(request.id, FinishReason.STOP, keep=len(builder.output.token_ids)):
                    committed.finished.append(request)
                if request.is_finished:
                    text += self._close(request, stopped)
                deltas.append(Delta(request.id, tokens, text, builder.output.finish_reason, builder.output))
        for request in committed.finished:
            if request.id in self._builders:  # ended without a token: by an error
                builder = self._builders[request.id]
                deltas.append(Delta(request.id, (), self._close(request, False), request.finish_reason, builder.output))
        return deltas

    def _close(self, request: Request, stopped_by_text: bool) -> str:
        assert request.finish_reason is not None
        reason = FinishReason.STOP if stopped_by_text else request.finish_reason
        return self._builders.pop(request.id).finish(reason, request.error, stopped_by_text=stopped_by_text)

    def close(self) -> None:
        self.executor.close()
        if self.recorder is not None:
            self.recorder.close()
