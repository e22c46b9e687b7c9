"""`evenflow bench stall`: how evenly streams get their tokens while long prompts are prefilled beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from evenflow.bench.curves import against_fixed
from evenflow.bench.plots import draw_curves, draw_tokens, pyplot
from evenflow.bench.stall import POLICIES, StallFigures, StallReport, compare_policies, measure, plan_turns
from evenflow.bench.stall_forecast import forecast_prompts, interval_to_keep_up, prompts_within, turn_seconds
from evenflow.bench.stall_load import StallLoad, english_prompts
from evenflow.cli.interrupts import INTERRUPTED, stopping_after_step
from evenflow.cli.options import (
    ModelOptions,
    ReportOptions,
    duration_option,
    engine_facts,
    engine_settings,
    file_option,
    option,
    read_policies,
    takes_options,
)
from evenflow.cli.output import loading, make_table, progress, text_console, write_json
from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec
from evenflow.core.report import Cause, CauseKind
from evenflow.counts import counted
from evenflow.engine.engine import Engine
from evenflow.engine.llm import LLM
from evenflow.errors import InvalidConfig

_SHOWN_CAUSE_S = 0.0005  # smaller causes are left out
_CAUSES = {
    CauseKind.DECODES: "decodes",
    CauseKind.UNEXPLAINED: "longer than predicted",
    CauseKind.HOST: "between steps",
    CauseKind.GARBAGE_COLLECTION: "garbage collection",
    CauseKind.KV_MEMORY: "no KV memory",
}
_COLUMNS: dict[str, Callable[[StallFigures], str]] = {
    "p50\nms": lambda policy: f"{1000 * policy.tbt_p50_s:.0f}",
    "p90\nms": lambda policy: f"{1000 * policy.tbt_p90_s:.0f}",
    "p99\nms": lambda policy: f"{1000 * policy.tbt_p99_s:.0f}",
    "max\nms": lambda policy: f"{1000 * policy.tbt_max_s:.0f}",
    "late\n%": lambda policy: "-" if policy.late_share is None else f"{100 * policy.late_share:.1f}",
    "steps": lambda policy: str(policy.steps),
    "long\nTTFT s": lambda policy: f"{policy.long_ttft_p50_s:.2f}",
    "prefill\ntokens/s": lambda policy: f"{policy.prefill_tokens_per_s:.0f}",
    "total\ns": lambda policy: f"{policy.total_s:.1f}",
    "output\ntokens/s": lambda policy: f"{policy.output_tokens_per_s:.1f}",
    "step time\nerror %": lambda policy: f"{100 * policy.step_time_mape:.1f}",
    "same\noutput": lambda policy: "yes" if policy.identical_outputs else "no",
}
_PROMPTS_PER_TURN = 2  # if long prompts do not overlap
_LONG_PROMPTS, _LONG_TOKENS, _RUNS = 6, 3000, 3
_QUICK_MAX_PROMPTS, _QUICK_LONG_TOKENS, _QUICK_RUNS = 3, 1000, 1
_QUICK_S = 60.0  # for all policies; loading and measuring come before


@dataclass(frozen=True, slots=True, kw_only=True)
class StallOptions:
    """The policies, the requests of the load, and what to show."""

    policies: str = option(
        "Policies to compare.", default=",".join(POLICIES), metavar="A,B", show_default=", ".join(POLICIES)
    )
    repeat: int | None = option("Runs under each policy, taken in turn.", min=1, show_default="3, or 1 with --quick")
    chats: int = option("Chats that decode at a time; one that ends is replaced.", default=6, min=1)
    chat_tokens: int = option("Output tokens of a chat.", default=200, min=2)
    long_prompts: int | None = option("Number of long prompts.", min=1, show_default="6, or 1 to 3 with --quick")
    long_tokens: int | None = option("Tokens of a long prompt.", min=16, show_default="3000, or 1000 with --quick")
    long_answer_tokens: int = option("Output tokens of a long prompt.", default=16, min=1)
    interval: float | None = duration_option("Time between long prompts.", show_default="what the slowest policy needs")
    quick: bool = option("Fewer and shorter prompts: about a minute.", "--quick", default=False)
    explain: bool = option("Print the longest gaps and their causes.", "--explain", default=False)
    plot: Path | None = file_option("Plot every token's gap over time to this file.")
    curve: Path | None = file_option("Plot TTFT and prefill rate over the p99 gap to this file.")

    @property
    def num_runs(self) -> int:
        return self.repeat or (_QUICK_RUNS if self.quick else _RUNS)


@takes_options
def stall(*, options: StallOptions, model: ModelOptions, report: ReportOptions) -> None:
    """Measure chats that decode while long prompts arrive.

    Shows how evenly the chats' tokens come, and what that costs the long prompts.
    """
    names = read_policies(options.policies, at_least=1)
    if options.plot is not None or options.curve is not None:
        pyplot()  # if it is missing, fail before the runs
    console = text_console(report.json)
    # Under a target the engine has step times from the start: kept ones, or measured now.
    settings = engine_settings(model) | {"policy": "target:1000ms", "enable_prefix_caching": False}
    with loading(model.model):
        llm = LLM(record=report.record, **settings)
    with stopping_after_step(), llm:
        with progress("Measuring steps") as say:
            comparison = _compare(llm.engine, _load(llm, options), names, options, console, say)
        # Before the engine closes, which after an interrupt waits for the step that runs.
        _show(console, comparison, options)
        write_json(report.json, _report(llm.config, comparison, options.num_runs))
    if not comparison.turns.is_complete:
        raise typer.Exit(INTERRUPTED)


def _compare(
    engine: Engine,
    load: StallLoad,
    policies: Sequence[PolicySpec],
    options: StallOptions,
    console: Console,
    say: Callable[[str], None],
) -> StallReport:
    chats, tokens = counted(load.num_chats, "chat"), counted(len(load.long_prompts[0]), "token")
    console.print(f"Measuring steps beside {chats}, with a prompt of {tokens} sent twice.")
    feasible_target_s = measure(engine, load, say)
    console.print(f"Lowest feasible target: {1000 * feasible_target_s:.0f} ms.")
    forecast, prompts_per_turn = forecast_prompts(engine, load, policies), None
    if options.quick and options.long_prompts is None:
        num_long = prompts_within(_QUICK_S, forecast, options.num_runs, len(load.long_prompts))
        load = replace(load, long_prompts=load.long_prompts[:num_long])
    if options.interval is None and options.quick:
        prompts_per_turn = 1  # so that no time passes between them
    elif options.interval is None:
        prompts_per_turn = _PROMPTS_PER_TURN
        load = replace(load, interval=interval_to_keep_up(forecast))
        console.print(f"A long prompt every {load.interval:.1f} s: the slowest policy keeps up with that.")
    turns = plan_turns(load, policies, options.num_runs, prompts_per_turn)
    seconds = sum(turn_seconds(turn, forecast) for turn in turns)
    runs = f"{options.num_runs} x {_prompts_text(load)}"
    console.print(f"Policies: {len(policies)}, with {runs} under each. This takes about {seconds:.0f} s.")
    return compare_policies(
        *(engine, load, policies, options.num_runs, feasible_target_s),
        prompts_per_turn=prompts_per_turn,
        forecast=forecast,
        on_progress=say,
    )


def _load(llm: LLM, options: StallOptions) -> StallLoad:
    long_tokens = options.long_tokens or (_QUICK_LONG_TOKENS if options.quick else _LONG_TOKENS)
    num_tokens = long_tokens + options.long_answer_tokens
    if num_tokens > llm.engine.limits.max_model_len:
        raise InvalidConfig(
            f"Got long prompts and answers of {num_tokens} tokens but the context is {llm.engine.limits.max_model_len}."
        )
    num_long = options.long_prompts or (_QUICK_MAX_PROMPTS if options.quick else _LONG_PROMPTS)
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    prompts = english_prompts(encode, num_long, long_tokens)
    return StallLoad(
        num_chats=options.chats,
        chat_prompts=prompts.chats,
        chat_tokens=options.chat_tokens,
        long_prompts=prompts.long,
        long_answer_tokens=options.long_answer_tokens,
        interval=options.interval or 0.0,
    )


def _table(comparison: StallReport) -> Table:
    load = comparison.load
    title = (
        f"{counted(load.num_chats, 'chat')} beside {_prompts_text(load)}, "
        f"{f'one every {load.interval:.1f} s' if load.interval else 'one at a time'}; "
        "gaps between tokens while a long prompt waits for its first"
    )
    table = make_table(title, "policy", *_COLUMNS)
    table.columns[0].no_wrap = True
    for policy in comparison.figures:
        name = policy.policy + ("*" if policy.feasible is False else "")
        table.add_row(name, *(cell(policy) for cell in _COLUMNS.values()))
    return table


def _prompts_text(load: StallLoad) -> str:
    return f"{counted(len(load.long_prompts), 'prompt')} of {counted(len(load.long_prompts[0]), 'token')}"


def _show(console: Console, comparison: StallReport, options: StallOptions) -> None:
    console.print(_table(comparison))
    if not comparison.turns.is_complete:
        done, turns = len(comparison.turns.results), len(comparison.turns.turns)
        console.print(f"Interrupted after {done} of {turns} turns: the figures are from these.")
    _print_notes(console, comparison)
    if options.explain:
        _print_worst(console, comparison)
    if options.plot is not None:
        draw_tokens(options.plot, comparison.first_runs, comparison.figures)
    if options.curve is not None:
        draw_curves(options.curve, comparison.figures)


def _print_notes(console: Console, comparison: StallReport) -> None:
    figures = comparison.figures
    if any(policy.feasible is False for policy in figures):
        console.print("* the target is below the lowest feasible one")
    for policy in figures:
        if (found := policy.divergence) is not None:
            gap = "" if found.logprob_gap is None else f"; the two likeliest tokens are {found.logprob_gap:.2g} apart"
            console.print(
                f"{policy.policy}: the answer to long prompt {found.prompt + 1} differs from that under "
                f"{figures[0].policy} from token {found.token + 1} on{gap}."
            )
    for target in against_fixed(figures):
        console.print(
            f"{target.policy}: a fixed budget with the same p99 of {1000 * target.tbt_p99_s:.0f} ms would take "
            f"{target.fixed_long_ttft_s:.2f} s to a long prompt's first token ({target.ttft_ratio:.2f}x of that here) "
            f"at {target.fixed_prefill_tokens_per_s:.0f} tokens/s of prefill ({target.prefill_ratio:.2f}x here)."
        )


def _print_worst(console: Console, comparison: StallReport) -> None:
    for policy in comparison.figures:
        console.print(f"\nThe longest gaps under {policy.policy}:")
        for gap in policy.worst:
            late = f", {1000 * gap.late_s:.0f} ms late" if gap.late_s else ""
            causes = ", ".join(_cause_text(cause) for cause in gap.causes if cause.seconds >= _SHOWN_CAUSE_S)
            console.print(f"  {1000 * gap.gap_s:.0f} ms{late} ({gap.request_id}, step {gap.step_id}): {causes}")


def _cause_text(cause: Cause) -> str:
    is_prefill = cause.kind is CauseKind.PREFILL
    what = f"{counted(cause.num_tokens, 'token')} of {cause.request_id}" if is_prefill else _CAUSES[cause.kind]
    return f"{1000 * cause.seconds:.0f} ms: {what}"


def _report(config: EngineConfig, comparison: StallReport, repeat: int) -> dict[str, Any]:
    load = comparison.load
    return {
        **engine_facts(config),
        "repeat": repeat,
        "complete": comparison.turns.is_complete,
        "chats": load.num_chats,
        "chat_tokens": load.chat_tokens,
        "long_prompts": len(load.long_prompts),
        "long_tokens": len(load.long_prompts[0]),
        "long_answer_tokens": load.long_answer_tokens,
        "interval_s": load.interval,
        "feasible_target_s": comparison.feasible_target_s,
        "runs": [_run_report(policy) for policy in comparison.figures],
        "against_fixed": against_fixed(comparison.figures),
    }


def _run_report(policy: StallFigures) -> dict[str, Any]:
    worst = [gap._asdict() | {"causes": [cause._asdict() for cause in gap.causes]} for gap in policy.worst]
    return asdict(policy) | {"identical_outputs": policy.identical_outputs, "worst": worst}
