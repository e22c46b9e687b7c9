"""The stall benchmark: what streams feel while long prompts are prefilled beside them, under several policies.

All policies run on one engine, in turn, with the same requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from evenflow.bench.figures import percentile
from evenflow.bench.stall_load import StallLoad, StallRun, join, longest_gaps, run_load
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
_ROOM_TO_KEEP_UP = 1.15


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a long prompt's answer first differs from that of the first run."""

    prompt: int
    token: int
    logprob_gap: float | None  # between the two likeliest tokens there; None: the executor gives none


@dataclass(frozen=True, slots=True)
class StallFigures:
    """All runs under one policy. Gaps are those of tokens that came while a long prompt waited for its first token."""

    policy: str
    target_s: float | None
    feasible: bool | None  # None: the policy has no target
    steps: int  # distinct ones in which these tokens came
    tbt_p50_s: float
    tbt_p90_s: float
    tbt_p99_s: float
    tbt_max_s: float
    late_share: float | None  # of the tokens, after their deadline; None: the policy sets none
    long_ttft_p50_s: float
    prefill_tokens_per_s: float  # while a long prompt waited
    total_s: float  # the median run's
    output_tokens_per_s: float
    step_time_mape: float  # of steps with prefill and decodes
    divergence: Divergence | None
    worst: tuple[Stall, ...]  # the longest of the gaps, longest first

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
    """Run one long prompt in large chunks and in small ones; returns the least target that could be kept."""
    for policy in _MEASURED_POLICIES:
        engine.set_policy(policy)
        run_load(engine, replace(load, long_prompts=load.long_prompts[:1]))
    return feasible_target(engine, load)


def feasible_target(engine: Engine, load: StallLoad) -> float:
    """Seconds of the chats' decodes and the least chunk at the end of a long prompt, with the model's margin."""
    start = max(0, max(map(len, load.long_prompts)) - FLOOR_TOKENS)
    context = max(map(len, load.chat_prompts)) + max(map(load.longest_chat, range(load.num_chats)))
    shape = engine.scheduler.caps.step_shape(
        num_decodes=load.num_chats,
        decode_context=load.num_chats * context,
        chunks=[(start, FLOOR_TOKENS)],
        prefill_logit_rows=1,
    )
    return engine.scheduler.step_time.upper(shape) + engine.scheduler.overhead


def interval_to_keep_up(engine: Engine, load: StallLoad, policies: Sequence[PolicySpec]) -> float:
    """Seconds between long prompts at which even the slowest policy ends one before the next comes.

    By a rehearsal of one prompt under each policy, in virtual time, at the step times measured so far.
    """
    rehearsed = replace(load, long_prompts=load.long_prompts[:1])
    slowest = max(run_load(_rehearsal_engine(engine, policy), rehearsed).total_s for policy in policies)
    return math.ceil(2 * _ROOM_TO_KEEP_UP * slowest) / 2


def _rehearsal_engine(engine: Engine, policy: PolicySpec) -> Engine:
    real = engine.scheduler
    step_time = StepTimeModel.from_record(real.step_time.to_record())
    known = StepTimeModel.from_record(real.step_time.to_record())  # apart from the one that goes on learning
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
    """Run the load `repeat` times under each policy. `on_run` is told what runs next.

    Policies take turns after so many long prompts, so that a machine that becomes slower does so for all of them; None:
    after the whole load, which prompts that wait for each other need. The engine has no prefix cache: the prompts are
    the same each time.
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
    tokens = [token for run in runs for token in run.tokens if token.counts]
    gaps = sorted(token.gap for token in tokens)
    p50, p90, p99, longest = (percentile(gaps, percent) for percent in (50, 90, 99, 100))
    target_s = policy.target
    return StallFigures(
        policy=str(policy),
        target_s=target_s,
        feasible=None if target_s is None else target_s >= feasible_target_s,
        steps=sum(len({token.step_id for token in run.tokens if token.counts}) for run in runs),
        tbt_p50_s=p50,
        tbt_p90_s=p90,
        tbt_p99_s=p99,
        tbt_max_s=longest,
        late_share=None if target_s is None else sum(token.is_late for token in tokens) / max(1, len(tokens)),
        long_ttft_p50_s=median(ttft for run in runs for ttft in run.long_ttft_s),
        prefill_tokens_per_s=sum(span.num_tokens for run in runs for span in run.prefills)
        / sum(run.pending_s for run in runs),
        total_s=median(run.total_s for run in runs),
        output_tokens_per_s=sum(run.output_tokens for run in runs) / sum(run.total_s for run in runs),
        step_time_mape=fmean([error for run in runs for error in run.step_errors] or [0.0]),
        divergence=divergence,
        worst=tuple(longest_gaps(stall for run in runs for stall in run.worst)),
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
    while (report := engine.step()) is not None:
        for [row, *_] in report.logprobs.values():
            return row.top[0].logprob - row.top[1].logprob
    return None
