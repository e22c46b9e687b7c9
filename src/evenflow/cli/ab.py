"""`evenflow ab`: two servers, or two policies of the embedded engine, under the same requests."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument

from evenflow.bench.ab import Goals, Outcome, compare, make_asks
from evenflow.bench.ab_report import draw, same_outputs, write_html
from evenflow.bench.endpoints import Ask
from evenflow.bench.estimates import CONFIDENCE
from evenflow.bench.plots import pyplot
from evenflow.bench.stall_load import english_prompts
from evenflow.cli.options import JsonTarget, duration_option, file_option, option, takes_options
from evenflow.cli.output import make_table, progress, text_console, write_json
from evenflow.cli.sides import check_sides, open_sides
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

_LONG_EVERY = 6  # every sixth request is a long text, the others are short questions
_LONG_CHARACTERS = 6000  # about 1,500 tokens
_SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOptions:
    """The requests that both sides get, when one counts as served well, and where the report goes."""

    data: Path | None = option("Prompts: JSONL, JSON, CSV, Parquet or texts.", metavar="PATH", show_default="built-in")
    field: str | None = option("The field of a record that holds its prompt.")
    requests: int = option("Requests in a round.", default=24, min=1)
    rate: float = option("Mean requests per second, at random times; 0 sends all at once.", default=2.0, min=0)
    max_tokens: int = option("Maximum tokens to generate for a request.", default=48, min=1)
    pairs: int = option("Pairs of rounds.", default=5, min=2)
    keep_prompts: bool = option("Reuse prompts across pairs to compare prefix caches.", "--keep-prompts", default=False)
    seed: int = option("Seed for arrival times, the order of rounds and the intervals.", default=0)
    ttft_target: float = duration_option("Longest TTFT of a request that is served well.", default="2s")
    tbt_target: float = duration_option("Longest gap between its tokens, at the 99th percentile.", default="200ms")
    model: str = option("For servers a model name, for policies as for generate.", default="default", metavar="MODEL")
    json: JsonTarget = None
    html: Path | None = file_option("Write the report to this file, as one HTML page.")
    plot: Path | None = file_option("Plot the ratios and gaps to this file.")


@takes_options
def ab(
    *,
    a: Annotated[str, Argument(metavar="A", help="A server's address (http://...), or a policy.")],
    b: Annotated[str, Argument(metavar="B", help="The server or policy to compare with A.")],
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
    goals = Goals(options.ttft_target, options.tbt_target)
    outcome = asyncio.run(_run(a, b, goals, options, asks))
    _print(text_console(options.json), a, b, outcome)
    if options.html is not None:
        write_html(options.html, (a, b), outcome)
    if options.plot is not None:
        draw(options.plot, (a, b), outcome)
    write_json(options.json, _report(a, b, goals, options, outcome))


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
    title = f"A: {a}\nB: {b}\n{len(outcome.pairs)} pairs of rounds of {len(outcome.pairs[0].a.answers)} requests"
    table = make_table(title, "", "A", "B", "B / A", f"{CONFIDENCE:.0%} interval", "differ")
    for estimate in outcome.estimates:
        table.add_row(*estimate.cells())
    console.print(table)
    console.print(same_outputs(outcome))
    for found in outcome.differences[:_SHOWN_DIFFERENCES]:
        console.print(
            f"  pair {found.pair + 1}, request {found.request + 1}, from character {found.character} on: "
            f"A {found.a!r}, B {found.b!r}"
        )
    for error in sorted(set(outcome.errors))[:_SHOWN_DIFFERENCES]:
        console.print(f"  failed: {error}")


def _report(a: str, b: str, goals: Goals, options: AbOptions, outcome: Outcome) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "pairs": options.pairs,
        "requests": len(outcome.pairs[0].a.answers),
        "rate": options.rate,
        "max_tokens": options.max_tokens,
        "goals": goals,
        "confidence": CONFIDENCE,
        "estimates": [
            asdict(estimate) | {"ratio": estimate.ratio, "differs": estimate.differs} for estimate in outcome.estimates
        ],
        "identical_outputs": not outcome.differences,
        "num_answers": outcome.num_answers,
        "differences": outcome.differences,
        "errors": outcome.errors,
    }
