"""`evenflow bench stall`: what streams feel while long prompts are prefilled beside them, policy by policy."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from typer import Option

from evenflow.bench.curves import AgainstFixed, against_fixed
from evenflow.bench.plots import draw_curves, draw_tokens, pyplot
from evenflow.bench.stall import POLICIES, Comparison, StallFigures, compare_policies, interval_to_keep_up, measure
from evenflow.bench.stall_load import StallLoad, english_prompts
from evenflow.cli.options import (
    ModelOptions,
    ReportOptions,
    knobs,
    parse_duration,
    parse_new_file,
    read_policies,
    takes_options,
)
from evenflow.cli.output import loading, table_console, write_json
from evenflow.config import EngineConfig
from evenflow.engine.llm import LLM
from evenflow.engine.stalls import Cause, CauseKind, Stall
from evenflow.errors import InvalidConfig

_VISIBLE_S = 0.0005
_CAUSES = {
    CauseKind.DECODES: "the decodes themselves",
    CauseKind.UNEXPLAINED: "longer than predicted",
    CauseKind.HOST: "between steps",
    CauseKind.GARBAGE_COLLECTION: "garbage collection",
    CauseKind.KV_MEMORY: "no KV memory",
}

_PROMPTS_PER_TURN = 2  # where they do not wait for each other


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What arrives."""

    chats: Annotated[int, Option(min=1, help="Streams that decode; one that ends is replaced.")] = 6
    chat_tokens: Annotated[int, Option(min=2, help="Tokens of a chat's answer.")] = 200
    long_prompts: Annotated[int, Option(min=1, help="Long prompts that arrive.")] = 6
    long_tokens: Annotated[int, Option(min=16, help="Tokens of a long prompt.")] = 3000
    long_answer_tokens: Annotated[int, Option(min=1, help="Tokens of a long prompt's answer.")] = 16
    interval: Annotated[
        float | None,
        Option(
            parser=parse_duration,
            metavar="DURATION",
            help="Time from one long prompt to the next.",
            show_default="what the slowest policy keeps up with",
        ),
    ] = None
    quick: Annotated[bool, Option("--quick", help="Half as many long prompts.")] = False


@takes_options
def stall(
    *,
    policies: Annotated[str, Option(metavar="A,B,...", help="Policies to compare, taken in turn.")] = ",".join(
        POLICIES
    ),
    repeat: Annotated[int, Option(min=1, help="Runs under each policy.")] = 3,
    options: LoadOptions,
    explain: Annotated[bool, Option("--explain", help="Print the longest gaps and their causes.")] = False,
    plot: Annotated[
        Path | None, Option(parser=parse_new_file, metavar="PATH", help="Draw every token's gap over time there.")
    ] = None,
    curve: Annotated[
        Path | None,
        Option(parser=parse_new_file, metavar="PATH", help="Draw there what each policy pays for its p99 gap."),
    ] = None,
    model: ModelOptions,
    report: ReportOptions,
) -> None:
    """Chats decode while long prompts arrive: how evenly their tokens come, and what that costs the long prompts."""
    names = read_policies(policies, at_least=1)
    if plot is not None or curve is not None:
        pyplot()  # missing it now is better than after the runs
    console = table_console(report.json)
    # A target, so that step times are known from the start, or measured.
    settings = knobs(model) | {"policy": "target:1000ms", "enable_prefix_caching": False}
    with loading(model.model) as say, LLM(record=report.record, **settings) as llm:
        load = _load(llm, options)
        say("Measuring step times beside the chats")
        feasible_target_s = measure(llm.engine, load)
        console.print(f"Least target that can be kept here: {1000 * feasible_target_s:.0f} ms.")
        prompts_per_turn = None
        if options.interval is None:
            prompts_per_turn = _PROMPTS_PER_TURN
            load = replace(load, interval=interval_to_keep_up(llm.engine, load, names))
            console.print(f"A long prompt every {load.interval:.1f} s: the slowest policy keeps up with that.")
        comparison = compare_policies(
            llm.engine, load, names, repeat, feasible_target_s, prompts_per_turn=prompts_per_turn, on_run=say
        )
    console.print(_table(comparison))
    if any(policy.feasible is False for policy in comparison.figures):
        console.print("* a target below the least that can be kept")
    _print_divergences(console, comparison)
    _print_against_fixed(console, against_fixed(comparison.figures))
    if explain:
        _print_worst(console, comparison)
    if plot is not None:
        draw_tokens(plot, comparison.first_runs, comparison.figures)
    if curve is not None:
        draw_curves(curve, comparison.figures)
    write_json(report.json, _report(llm.config, comparison, repeat))


def _load(llm: LLM, options: LoadOptions) -> StallLoad:
    num_tokens = options.long_tokens + options.long_answer_tokens
    if num_tokens > llm.engine.limits.max_model_len:
        raise InvalidConfig(
            f"Got long prompts and answers of {num_tokens} tokens but the context is {llm.engine.limits.max_model_len}."
        )
    num_long = max(1, options.long_prompts // 2) if options.quick else options.long_prompts
    encode = partial(llm.tokenizer.encode, add_special_tokens=False)
    prompts = english_prompts(encode, num_long, options.long_tokens)
    return StallLoad(
        num_chats=options.chats,
        chat_prompts=prompts.chats,
        chat_tokens=options.chat_tokens,
        long_prompts=prompts.long,
        long_answer_tokens=options.long_answer_tokens,
        interval=options.interval or 0.0,
    )


def _table(comparison: Comparison) -> Table:
    load = comparison.load
    title = (
        f"{load.num_chats} chats beside {len(load.long_prompts)} prompts of {len(load.long_prompts[0])} tokens, "
        f"one every {load.interval:.1f} s; gaps between tokens while a long prompt waits for its first"
    )
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for name in (
        "p50\nms",
        "p90\nms",
        "p99\nms",
        "max\nms",
        "late\n%",
        "steps",
        "long\nTTFT s",
        "prefill\ntokens/s",
        "total\ns",
        "output\ntokens/s",
        "step time\nerror %",
        "same\noutput",
    ):
        table.add_column(name, justify="right")
    for policy in comparison.figures:
        table.add_row(policy.policy + ("*" if policy.feasible is False else ""), *_cells(policy))
    return table


def _cells(policy: StallFigures) -> list[str]:
    gaps = (policy.tbt_p50_s, policy.tbt_p90_s, policy.tbt_p99_s, policy.tbt_max_s)
    return [
        *(f"{1000 * gap:.0f}" for gap in gaps),
        "-" if policy.late_share is None else f"{100 * policy.late_share:.1f}",
        str(policy.steps),
        f"{policy.long_ttft_p50_s:.2f}",
        f"{policy.prefill_tokens_per_s:.0f}",
        f"{policy.total_s:.1f}",
        f"{policy.output_tokens_per_s:.1f}",
        f"{100 * policy.step_time_mape:.1f}",
        "yes" if policy.identical_outputs else "no",
    ]


def _print_divergences(console: Console, comparison: Comparison) -> None:
    for policy in comparison.figures:
        if (found := policy.divergence) is not None:
            gap = "" if found.logprob_gap is None else f"; the two likeliest tokens are {found.logprob_gap:.2g} apart"
            console.print(
                f"{policy.policy}: the answer to long prompt {found.prompt + 1} differs from that under "
                f"{comparison.figures[0].policy} from token {found.token + 1} on{gap}."
            )


def _print_against_fixed(console: Console, targets: list[AgainstFixed]) -> None:
    for target in targets:
        console.print(
            f"{target.policy}: a fixed budget with the same p99 of {1000 * target.tbt_p99_s:.0f} ms would take "
            f"{target.fixed_long_ttft_s:.2f} s to a long prompt's first token ({target.ttft_ratio:.2f}x of that here) "
            f"at {target.fixed_prefill_tokens_per_s:.0f} tokens/s of prefill ({target.prefill_ratio:.2f}x here).",
            soft_wrap=True,
        )


def _print_worst(console: Console, comparison: Comparison) -> None:
    for policy in comparison.figures:
        console.print(f"\nThe longest gaps under {policy.policy}:")
        for gap in policy.worst:
            causes = ", ".join(
                f"{1000 * cause.seconds:.0f} ms {_words(cause)}" for cause in gap.causes if cause.seconds >= _VISIBLE_S
            )
            late = f", {1000 * gap.late_s:.0f} ms late" if gap.late_s else ""
            felt = f"{1000 * gap.gap_s:.0f} ms{late} ({gap.request_id}, step {gap.step_id})"
            console.print(f"  {felt}: {causes}", soft_wrap=True)


def _words(cause: Cause) -> str:
    if cause.kind is CauseKind.PREFILL:
        return f"{cause.num_tokens} tokens of {cause.request_id}"
    return _CAUSES[cause.kind]


def _report(config: EngineConfig, comparison: Comparison, repeat: int) -> dict[str, Any]:
    load = comparison.load
    return {
        "model": config.model,
        "weights": config.weights,
        "repeat": repeat,
        "chats": load.num_chats,
        "chat_tokens": load.chat_tokens,
        "long_prompts": len(load.long_prompts),
        "long_tokens": len(load.long_prompts[0]),
        "long_answer_tokens": load.long_answer_tokens,
        "interval_s": load.interval,
        "feasible_target_s": comparison.feasible_target_s,
        "runs": [_run_report(policy) for policy in comparison.figures],
        "against_fixed": [
            asdict(target) | {"ttft_ratio": target.ttft_ratio, "prefill_ratio": target.prefill_ratio}
            for target in against_fixed(comparison.figures)
        ],
    }


def _run_report(policy: StallFigures) -> dict[str, Any]:
    return asdict(policy) | {
        "identical_outputs": policy.identical_outputs,
        "worst": [_stall_report(gap) for gap in policy.worst],
    }


def _stall_report(gap: Stall) -> dict[str, Any]:
    return asdict(gap) | {"causes": [cause._asdict() for cause in gap.causes]}
