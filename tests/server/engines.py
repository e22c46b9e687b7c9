"""Engines that tests start in a process of their own: what is imported here, that process imports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from evenflow.config import EngineConfig
from evenflow.core import tier
from evenflow.core.logprobs import LogprobRows, RowLogprobs, TokenLogprob
from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.engine.watchdog import Pulse
from evenflow.executors.fake import FakeExecutor
from evenflow.executors.faulty import Fault, FaultyExecutor
from evenflow.server.engine.process import build_served_engine

VOCAB_SIZE = 512
MAX_MODEL_LEN = 1000


class ScriptedExecutor(FakeExecutor):
    """Takes real time, and where a script is given answers with its tokens, over and over, instead of made-up ones."""

    def __init__(self, step_s: float, script: tuple[int, ...], poison: int | None) -> None:
        super().__init__(vocab_size=VOCAB_SIZE, cost=lambda shape: step_s)
        self._prompt_lengths: dict[int, int] = {}
        self._step_s = step_s
        self._script = script
        self._poison = poison  # a prompt's first token that makes its step fail

    def wait(self) -> StepResult:
        plan: StepPlan = self._queue[0][0]
        positions = [*plan.decodes.positions, *(chunk.end - 1 for chunk in plan.chunks)]
        slots = [*plan.decodes.slots, *(chunk.slot for chunk in plan.chunks)]
        self._prompt_lengths |= {admission.slot: admission.num_prompt_tokens for admission in plan.admissions}
        result = super().wait()
        time.sleep(self._step_s)
        if self._script:
            starts = [self._prompt_lengths[slot] for slot in slots]
            tokens = tuple(
                (self._script[(position + 1 - start) % len(self._script)],) if given else ()
                for position, start, given in zip(positions, starts, result.tokens, strict=True)
            )
        else:
            tokens = result.tokens
        errors = {
            row: "the prompt is poison" for row, slot in enumerate(slots) if self._slots[slot].tokens[0] == self._poison
        }
        rows = {row: LogprobRows.of([_scripted_row(given[0])]) for row, given in enumerate(tokens) if given}
        return StepResult(plan.step_id, tokens, result.seconds, errors=errors, logprobs=rows)


def _scripted_row(token: int) -> RowLogprobs:
    return RowLogprobs(TokenLogprob(token, -0.5), (TokenLogprob(token, -0.5), TokenLogprob(9, -2.0)))


class ScoringExecutor(ScriptedExecutor):
    """Scores every token with the longest tokens and figures that there are: responses are as large as they can be."""

    def __init__(self) -> None:
        super().__init__(0.0, (_LONGEST,), None)
        self._num_top: dict[int, int] = {}
        self._is_scored: dict[int, bool] = {}

    def wait(self) -> StepResult:
        plan: StepPlan = self._queue[0][0]
        for admission in plan.admissions:
            self._num_top[admission.slot] = admission.sampling.prompt_logprobs or 0
            self._is_scored[admission.slot] = admission.sampling.logprobs is not None
        slots = [*plan.decodes.slots, *(chunk.slot for chunk in plan.chunks)]
        result = super().wait()
        logprobs = {
            row: LogprobRows.of([_worst_row(20)])
            for row, (slot, given) in enumerate(zip(slots, result.tokens, strict=True))
            if given and self._is_scored[slot]
        }
        prompts = {
            number: LogprobRows.of([_worst_row(self._num_top[chunk.slot])] * (chunk.length - chunk.samples))
            for number, chunk in enumerate(plan.chunks, len(plan.decodes))
            if chunk.prompt_logprobs
        }
        return replace(result, logprobs=logprobs, prompt_logprobs=prompts)


_LONGEST = 494  # of the tokens in tests/server/serving.py


def _worst_row(num_top: int) -> RowLogprobs:
    one = TokenLogprob(_LONGEST, -1.2345678901234567e-05)
    return RowLogprobs(one, tuple(TokenLogprob(VOCAB_SIZE - 1 - rank, one.logprob) for rank in range(num_top)))


def scoring_engine() -> Engine:
    executor = ScoringExecutor()
    config = SchedulerConfig(num_blocks=8000, max_num_seqs=64, policy=PolicySpec.parse("fixed:256"))
    return Engine(Scheduler(config, executor.caps), executor, Limits(MAX_MODEL_LEN, VOCAB_SIZE))


def scripted_engine(
    step_s: float = 0.0,
    script: tuple[int, ...] = (),
    policy: str = "fixed:256",
    max_num_seqs: int = 64,
    num_blocks: int = 8000,
    poison: int | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    classes: Classes = DEFAULT_CLASSES,
    faults: Sequence[Fault] = (),
    marker: str = "",
    step_timeout_s: float = 60.0,
) -> Engine:
    """`faults` happen in the first process alone, which leaves this file behind; without a file, in each."""
    sizes = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs}
    config = SchedulerConfig(**sizes, policy=PolicySpec.parse(policy), classes=classes)
    if marker and Path(marker).exists():
        faults = ()
    if marker:
        Path(marker).touch()
    executor = FaultyExecutor(ScriptedExecutor(step_s, script, poison), faults)
    limits = Limits(max_model_len, VOCAB_SIZE)
    return Engine(Scheduler(config, executor.caps), executor, limits, pulse=Pulse(step_timeout_s))


def always_moving_engine(config: EngineConfig) -> Engine:
    """Of a real model, whose prefixes are moved out and back even where computing them is quicker."""
    from evenflow.executors.kv_tier import KvTier

    KvTier.measure = lambda self: (0.0, 0.0)  # type: ignore[method-assign]
    tier._KEPT = 1.0
    return build_served_engine(config)
