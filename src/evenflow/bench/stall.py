"""The stall benchmark: several policies under the stall load, in turn, on one engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import ClientFigures, StallRun, join, longest_gaps
from evenflow.bench.stall_steps import run_load
from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.report import Stall
from evenflow.core.request import SamplingParams
from evenflow.core.scheduler import Scheduler
from evenflow.core.step_time import StepTimeModel
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.executors.fake import FakeExecutor

POLICIES = ("unchunked", "fixed:256", "fixed:512", "adaptive", "target:200ms")
# Large chunks and small ones, up to the end of a long prompt.
_MEASURED_POLICIES = (PolicySpec("fixed", 256), PolicySpec("fixed", 32))
_INTERVAL_MARGIN = 1.15


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a long prompt's answer first differs from that of the first run."""

    prompt: int
    token: int
    logprob_gap: float | None  # between the two likeliest tokens there; None: the executor gives none


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFigures(ClientFigures):
    """The clients' figures, and what the engine reported."""

    feasible: bool | None  # None: the policy has no target
    steps: int  # in which tokens came whose gaps count
    late_share: float | None  # of these tokens, after their deadline; None: the policy sets none
    step_time_mape: float  # of steps with prefill and decodes
    divergence: Divergence | None
    worst: tuple[Stall, ...]  # the longest gaps, longest first

    @property
    def identical_outputs(self) -> bool:
        return self.divergence is None


@dataclass(frozen=True, slots=True)
class Comparison:
    load: StallLoad
    feasible_target_s: float
    figures: list[StallFigures]
    first_runs: dict[str, StallRun]  # by policy


def measure(engine: Engine, load: StallLoad) -> float:
    """Run one long prompt in large chunks and in small ones; returns the lowest feasible target."""
    for policy in _MEASURED_POLICIES:
        engine.set_policy(policy)
        run_load(engine, replace(load, long_prompts=load.long_prompts[:1]))
    return feasible_target(engine, load)


def feasible_target(engine: Engine, load: StallLoad) -> float:
    """Upper bound of a step's seconds with all chats' decodes and the smallest chunk at the end of a long prompt."""
    start = max(0, max(map(len, load.long_prompts)) - FLOOR_TOKENS)
    shape = engine.scheduler.caps.step_shape(
        num_decodes=load.num_chats,
        decode_context=load.num_chats * load.max_chat_length,
        chunks=[(start, FLOOR_TOKENS)],
        prefill_logit_rows=1,
    )
    return engine.scheduler.step_time.upper(shape) + engine.scheduler.overhead


def interval_to_keep_up(engine: Engine, load: StallLoad, policies: Sequence[PolicySpec]) -> float:
    """Seconds between long prompts at which even the slowest policy finishes one before the next arrives.

    Simulates one prompt under each policy, at the step times measured so far.
    """
    one_prompt = replace(load, long_prompts=load.long_prompts[:1])
    slowest = max(run_load(_simulated(engine, policy), one_prompt).total_s for policy in policies)
    return math.ceil(2 * _INTERVAL_MARGIN * slowest) / 2


def _simulated(engine: Engine, policy: PolicySpec) -> Engine:
    real = engine.scheduler
    # Two copies: the scheduler's goes on learning, the executor's must not.
    step_time, known = (StepTimeModel.from_record(real.step_time.to_record()) for _ in range(2))
    executor = FakeExecutor(
        vocab_size=engine.limits.vocab_size, block_size=real.block_size, caps=real.caps, cost=known.predict
    )
    config = replace(real.config, policy=_resolved(engine, policy))
    scheduler = Scheduler(config, real.caps, step_time=step_time)
    return Engine(scheduler, executor, engine.limits, clock=executor.clock)


def _resolved(engine: Engine, policy: PolicySpec) -> PolicySpec:
    return EngineConfig(policy=policy).resolve_policy(engine.limits.max_model_len)


def compare_policies(
    engine: Engine,
    load: StallLoad,
    policies: Sequence[PolicySpec],
    repeat: int,
    feasible_target_s: float,
    *,
    prompts_per_turn: int | None = None,
    on_run: Callable[[str], None] = lambda policy: None,
) -> Comparison:
    """Run the load `repeat` times under each policy. `on_run` gets a line before each run.

    Policies take turns every `prompts_per_turn` long prompts, so that a machine that slows down does so for all of
    them. None: after the whole load, for long prompts that overlap. The engine must have no prefix cache, because the
    prompts are the same each time.
    """
    runs: dict[PolicySpec, list[StallRun]] = {policy: [] for policy in policies}
    for number in range(repeat):
        parts: dict[PolicySpec, list[StallRun]] = {policy: [] for policy in policies}
        for part in load.parts(prompts_per_turn or len(load.long_prompts)):
            for policy in policies:
                last = part.first_number + len(part.long_prompts) - 1
                on_run(f"{policy}, long prompts {part.first_number} to {last}, run {number + 1} of {repeat}")
                engine.set_policy(_resolved(engine, policy))
                parts[policy].append(run_load(engine, part))
        for policy in policies:
            runs[policy].append(join(parts[policy]))
    expected = runs[policies[0]][0].long_answers
    figures = [
        _figures(policy, runs[policy], feasible_target_s, _divergence(engine, load, expected, runs[policy]))
        for policy in policies
    ]
    return Comparison(load, feasible_target_s, figures, {str(policy): runs[policy][0] for policy in policies})


def _figures(
    policy: PolicySpec, runs: Sequence[StallRun], feasible_target_s: float, divergence: Divergence | None
) -> StallFigures:
    target_s, counted = policy.target, [run.counted for run in runs]
    num_late, num_tokens = sum(run.num_late for run in runs), sum(map(len, counted))
    return StallFigures.of(
        str(policy),
        target_s,
        runs,
        feasible=None if target_s is None else target_s >= feasible_target_s,
        steps=sum(len({token.at for token in tokens}) for tokens in counted),
        late_share=None if target_s is None else num_late / num_tokens,
        step_time_mape=fmean([error for run in runs for error in run.step_errors] or [0.0]),
        divergence=divergence,
        worst=tuple(longest_gaps(gap for run in runs for gap in run.worst)),
    )


def _divergence(
    engine: Engine, load: StallLoad, expected: Sequence[list[int]], runs: Sequence[StallRun]
) -> Divergence | None:
    for run in runs:
        for prompt, (wanted, found) in enumerate(zip(expected, run.long_answers, strict=True)):
            if wanted != found:
                token = next(place for place, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
                known = [*load.long_prompts[prompt], *wanted[:token]]
                return Divergence(prompt, token, _logprob_gap(engine, known))
    return None


def _logprob_gap(engine: Engine, token_ids: list[int]) -> float | None:
    """How much likelier the likeliest next token is than the second; near 0 either may be chosen."""
    intake = Intake(engine.limits, engine.scheduler.block_size, clock=engine.clock)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, logprobs=2)
    engine.add(intake.prepare(token_ids, sampling, policy=engine.policy))
    gap = None
    while (report := engine.step()) is not None:
        for [row, *_] in report.logprobs.values():
            gap = row.top[0].logprob - row.top[1].logprob
    return gap
