"""The stall benchmark: several policies under the stall load, in turn, on one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from evenflow.bench.comparison import Comparison, Turn, resolved_for
from evenflow.bench.stall_forecast import Forecast, forecast_prompts, turn_seconds
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import ClientFigures, StallRun, join, longest_gaps
from evenflow.bench.stall_steps import run_load
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import FLOOR_TOKENS
from evenflow.core.report import Stall
from evenflow.core.request import SamplingParams
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake

StallTurns = Comparison[PolicySpec, StallRun]

POLICIES = ("unchunked", "fixed:256", "fixed:512", "adaptive", "target:200ms")
# Large chunks and small ones, up to the end of a long prompt.
_MEASURED_POLICIES = (PolicySpec("fixed", 256), PolicySpec("fixed", 32))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a long prompt's answer first differs from that of the first run."""

    prompt: int
    token: int
    logprob_gap: float | None  # between the two likeliest tokens there; None: the engine cannot say


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
class StallReport:
    load: StallLoad
    feasible_target_s: float
    figures: list[StallFigures]
    first_runs: dict[str, StallRun]  # by policy
    turns: StallTurns


def measure(engine: Engine, load: StallLoad, on_progress: Callable[[str], None] = lambda text: None) -> float:
    """Run one long prompt in large chunks and in small ones; returns the lowest feasible target.

    `on_progress` gets a line after each step.
    """
    part = replace(load, long_prompts=load.long_prompts[:1])
    forecast = forecast_prompts(engine, part, _MEASURED_POLICIES)
    turns = _turns(engine, [Turn(policy, 0, part) for policy in _MEASURED_POLICIES], forecast)
    _run_turns(engine, turns, lambda turn: "Measuring steps", on_progress)
    return feasible_target(engine, load)


def _turns(engine: Engine, turns: Sequence[Turn[PolicySpec]], forecast: Forecast) -> StallTurns:
    return StallTurns(turns, [turn_seconds(turn, forecast) for turn in turns], engine.clock)


def _run_turns(
    engine: Engine,
    turns: StallTurns,
    describe: Callable[[Turn[PolicySpec]], str],
    on_progress: Callable[[str], None],
) -> None:
    for turn in turns:
        what = describe(turn)

        def say(share: float, what: str = what) -> None:
            on_progress(f"{what}; {turns.progress(share)}")

        say(0.0)
        engine.set_policy(resolved_for(engine, turn.side))
        turns.add(run_load(engine, turn.load, say))


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


def plan_turns(
    load: StallLoad, policies: Sequence[PolicySpec], repeat: int, prompts_per_turn: int | None
) -> list[Turn[PolicySpec]]:
    """The turns of `compare_policies`: the policies alternate, so that a machine that slows down does so for all."""
    parts = load.parts(prompts_per_turn or len(load.long_prompts))
    return [Turn(policy, number, part) for number in range(repeat) for part in parts for policy in policies]


def compare_policies(
    engine: Engine,
    load: StallLoad,
    policies: Sequence[PolicySpec],
    repeat: int,
    feasible_target_s: float,
    *,
    prompts_per_turn: int | None = None,
    forecast: Forecast | None = None,
    on_progress: Callable[[str], None] = lambda text: None,
) -> StallReport:
    """Run the load `repeat` times under each policy. `on_progress` gets a line before each turn and after each step.

    Policies take turns every `prompts_per_turn` long prompts. None: after the whole load, for long prompts that
    overlap. The engine must have no prefix cache, because the prompts are the same each time. An interrupt after the
    first turn ends the comparison with what has run; the engine is then of no more use.
    """

    def describe(turn: Turn[PolicySpec]) -> str:
        first = turn.load.first_number
        last = first + len(turn.load.long_prompts) - 1
        prompts = f"long prompt {first}" if first == last else f"long prompts {first} to {last}"
        return f"{turn.side}, {prompts}, run {turn.round + 1} of {repeat}"

    turns: StallTurns | None = None
    try:
        forecast = forecast or forecast_prompts(engine, load, policies)
        turns = _turns(engine, plan_turns(load, policies, repeat, prompts_per_turn), forecast)
        _run_turns(engine, turns, describe, on_progress)
    except KeyboardInterrupt:
        if turns is None or not turns.results:
            raise
    runs = {policy: _whole_runs(turns, policy, load) for policy in policies if turns.of(policy)}
    expected = next(iter(runs.values()))[0].long_answers
    usable_engine = engine if turns.is_complete else None
    figures = [
        _figures(policy, found, feasible_target_s, _divergence(usable_engine, load, expected, found))
        for policy, found in runs.items()
    ]
    return StallReport(
        load, feasible_target_s, figures, {str(policy): found[0] for policy, found in runs.items()}, turns
    )


def _whole_runs(turns: StallTurns, policy: PolicySpec, load: StallLoad) -> list[StallRun]:
    """The runs of one policy, without one that was interrupted unless there is no other."""
    done = [(turn.round, part) for turn, part in zip(turns.turns, turns.results, strict=False) if turn.side == policy]
    runs = [join(part for _, part in parts) for _, parts in groupby(done, key=itemgetter(0))]
    return [run for run in runs if len(run.long_answers) == len(load.long_prompts)] or runs


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
    engine: Engine | None, load: StallLoad, expected: Sequence[list[int]], runs: Sequence[StallRun]
) -> Divergence | None:
    for run in runs:
        # After an interrupt some policies have answers to fewer prompts.
        for prompt, (wanted, found) in enumerate(zip(expected, run.long_answers, strict=engine is not None)):
            if wanted != found:
                token = next(place for place, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b)
                known = [*load.long_prompts[prompt], *wanted[:token]]
                return Divergence(prompt, token, None if engine is None else _logprob_gap(engine, known))
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
