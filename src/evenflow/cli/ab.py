"""`evenflow ab`: two servers, or two policies of the embedded engine, under the same requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Argument

from evenflow.bench.ab import MIN_PAIRS, Goals, Outcome, compare, make_asks
from evenflow.bench.ab_report import draw, figure_notes, same_outputs, write_html
from evenflow.bench.endpoints import Ask
from evenflow.bench.figures import CONFIDENCE
from evenflow.bench.plots import pyplot
from evenflow.bench.stall_load import english_prompts
from evenflow.cli.completion import complete_model, complete_policy
from evenflow.cli.interrupts import INTERRUPTED
from evenflow.cli.options import JsonTarget, duration_option, file_option, option, takes_options, target_option
from evenflow.cli.output import SHOWN, print_differences, print_estimates, progress, text_console, write_json
from evenflow.cli.sides import check_sides, is_policy, open_sides, policy_of
from evenflow.core.policies import PolicySpec
from evenflow.duration import parse_target
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

_LONG_EVERY = 6  # every sixth request is a long text, the others are short questions
_LONG_CHARACTERS = 6000  # about 1,500 tokens
_USUAL_TBT_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOptions:
    """The requests that both sides get, when one counts as served well, and where the report goes."""

    data: Path | None = option("Prompts: JSONL, JSON, CSV, Parquet or texts.", metavar="PATH", show_default="built-in")
    field: str | None = option("The field of a record that holds its prompt.")
    requests: int = option("Requests in a round.", default=24, min=1)
    rate: float = option("Mean requests per second, at random times; 0 sends all at once.", default=2.0, min=0)
    max_tokens: int = option("Maximum tokens to generate for a request.", default=48, min=1)
    pairs: int = option("Pairs of rounds.", default=5, min=MIN_PAIRS)
    keep_prompts: bool = option("Reuse prompts across pairs to compare prefix caches.", "--keep-prompts", default=False)
    seed: int = option("Seed for arrival times, the order of rounds and the intervals.", default=0)
    ttft_target: float = duration_option("Longest TTFT of a request that is served well.", default="2s")
    tbt_target: str | None = target_option(
        "Longest gap between its tokens, at the 99th percentile.", show_default="the target of A or B, else 200ms"
    )
    model: str = option(
        "For servers a model name, for policies as for generate.",
        default="default",
        metavar="MODEL",
        autocompletion=complete_model,
    )
    json: JsonTarget = None
    html: Path | None = file_option("Write the report to this file, as one HTML page.")
    plot: Path | None = file_option("Plot the ratios and gaps to this file.")


@takes_options
def ab(
    *,
    a: Annotated[
        str,
        Argument(metavar="A", help="A server (http://127.0.0.1:8000) or a policy.", autocompletion=complete_policy),
    ],
    b: Annotated[
        str, Argument(metavar="B", help="The server or policy to compare with A.", autocompletion=complete_policy)
    ],
    options: AbOptions,
) -> None:
    """Compare two servers or policies under the same requests.

    Both get the requests in paired, interleaved rounds; each ratio comes with a confidence interval. Servers that need
    a key get the one in $EVENFLOW_API_KEY.
    """
    check_sides((a, b))
    if options.html is not None or options.plot is not None:
        pyplot()  # if it is missing, fail before the runs
    asks = make_asks(_prompts(options), options.max_tokens, options.rate, options.seed)
    goals = _goals(a, b, options)
    outcome = asyncio.run(_run(a, b, goals, options, asks))
    _print(text_console(options.json), a, b, outcome)
    if options.html is not None:
        write_html(options.html, (a, b), outcome)
    if options.plot is not None:
        draw(options.plot, (a, b), outcome)
    write_json(options.json, _report(a, b, options, outcome))
    if not outcome.is_complete:
        raise typer.Exit(INTERRUPTED)


def _goals(a: str, b: str, options: AbOptions) -> Goals:
    if options.tbt_target is not None:
        return Goals(options.ttft_target, parse_target(options.tbt_target))
    targets = {
        seconds: name
        for name, side in (("B", b), ("A", a))
        if is_policy(side) and (seconds := PolicySpec.parse(policy_of(side)).target) is not None
    }
    if not targets:
        return Goals(options.ttft_target, _USUAL_TBT_S, "the default of --tbt-target")
    # The larger of two: each side then meets it by keeping its own.
    longest = max(targets)
    which = "the larger target" if len(targets) > 1 else f"the target of {targets[longest]}"
    return Goals(options.ttft_target, longest, f"{which}; --tbt-target sets another")


def _prompts(options: AbOptions) -> list[str]:
    if options.data is None:
        # Characters stand in for tokens: the servers' tokenizers are not known here.
        found = english_prompts(
            lambda text: list(map(ord, text)), 1 + options.requests // _LONG_EVERY, _LONG_CHARACTERS
        )
        chats, long = (["".join(map(chr, prompt)) for prompt in prompts] for prompts in found)
        return [
            long[number // _LONG_EVERY] if number % _LONG_EVERY == _LONG_EVERY - 1 else chats[number % len(chats)]
            for number in range(options.requests)
        ]
    inputs = islice(read_inputs(options.data, options.field, ReadTally()), options.requests)
    prompts = [one.text for one in inputs if not isinstance(one, TraceRequest)]
    if not prompts:
        raise InvalidInput(f"Got --data {str(options.data)!r} but found no prompt in it.")
    return prompts


async def _run(a: str, b: str, goals: Goals, options: AbOptions, asks: list[Ask]) -> Outcome:
    settings: dict[str, Any] = {"num_pairs": options.pairs, "seed": options.seed, "keep_prompts": options.keep_prompts}
    # A prefix cache would favour second rounds.
    async with open_sides((a, b), options.model, enable_prefix_caching=False) as (one, other):
        with progress("Starting") as say:
            return await compare(one, other, asks, goals=goals, on_round=say, **settings)


def _print(console: Console, a: str, b: str, outcome: Outcome) -> None:
    print_estimates(console, f"A: {a}\nB: {b}", outcome.estimates)
    for note in (*figure_notes(outcome), same_outputs(outcome)):
        console.print(note)
    print_differences(console, outcome.differences)
    for error in sorted(set(outcome.errors))[:SHOWN]:
        console.print(f"  failed: {error}")


def _report(a: str, b: str, options: AbOptions, outcome: Outcome) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "pairs": len(outcome.pairs),
        "complete": outcome.is_complete,
        "requests": len(outcome.pairs[0].a.answers),
        "rate": options.rate,
        "max_tokens": options.max_tokens,
        "goals": outcome.goals,
        "confidence": CONFIDENCE,
        "estimates": outcome.estimates,
        "identical_outputs": not outcome.differences,
        "num_answers": outcome.num_answers,
        "differences": outcome.differences,
        "errors": outcome.errors,
    }
