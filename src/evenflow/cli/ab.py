"""`evenflow ab`: two servers, or two policies of the embedded engine, under the same requests."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from typer import Argument, Option

from evenflow.bench.ab import CONFIDENCE, Goals, Outcome, compare, make_asks
from evenflow.bench.ab_report import cells, draw, same_outputs, write_html
from evenflow.bench.endpoints import Ask, Endpoint, HttpEndpoint, PolicyEndpoint
from evenflow.bench.plots import pyplot
from evenflow.bench.stall_load import english_prompts
from evenflow.cli.options import JsonTarget, duration_option, file_option, takes_options
from evenflow.cli.output import loading, make_table, progress, text_console, write_json
from evenflow.core.policies import PolicySpec
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

_LONG_EVERY = 6  # every sixth request is a long text, the others are short questions
_LONG_CHARACTERS = 6000  # about 1,500 tokens
_SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AbLoad:
    """The requests that both sides get."""

    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Prompts: JSONL, JSON, CSV, Parquet or texts.", show_default="built-in ones"),
    ] = None
    field: Annotated[str | None, Option(help="The field of a record that holds its prompt.")] = None
    requests: Annotated[int, Option(min=1, help="Requests in a round.")] = 24
    rate: Annotated[float, Option(min=0, help="Mean requests per second, at random times; 0 sends all at once.")] = 2.0
    max_tokens: Annotated[int, Option(min=1, help="Maximum tokens to generate for a request.")] = 48
    pairs: Annotated[int, Option(min=2, help="Pairs of rounds.")] = 5
    keep_prompts: Annotated[
        bool, Option("--keep-prompts", help="Send the same prompts in each pair, to compare prefix caches.")
    ] = False
    seed: Annotated[int, Option(help="Seed for arrival times, the order of rounds and the intervals.")] = 0


@takes_options
def ab(
    *,
    a: Annotated[str, Argument(metavar="A", help="A server's address (http://...), or a policy.")],
    b: Annotated[str, Argument(metavar="B", help="The server or policy to compare with A.")],
    load: AbLoad,
    ttft_target: Annotated[
        float, duration_option("A request is served well if its first token comes within this time ...")
    ] = "2s",  # type: ignore[assignment]
    tbt_target: Annotated[
        float, duration_option("... and 99% of the gaps between its tokens are no longer than this.")
    ] = "200ms",  # type: ignore[assignment]
    model: Annotated[
        str | None, Option(metavar="MODEL", help="For servers a model name, for policies as for generate.")
    ] = None,
    json: JsonTarget = None,
    html: Annotated[Path | None, file_option("Write the report to this file, as one HTML page.")] = None,
    plot: Annotated[Path | None, file_option("Plot the ratios and gaps to this file.")] = None,
) -> None:
    """Compare two servers or policies under the same requests.

    Both get the requests in paired, interleaved rounds; each ratio comes with a confidence interval. Servers that need
    a key get the one in $EVENFLOW_API_KEY.
    """
    for side in (a, b):
        if not _is_address(side):
            PolicySpec.parse(side)
    if a == b:
        raise InvalidInput(f"Got {a!r} twice but expected two that differ.")
    if html is not None or plot is not None:
        pyplot()  # if it is missing, fail before the runs
    asks = make_asks(_prompts(load), load.max_tokens, load.rate, load.seed)
    goals = Goals(ttft_target, tbt_target)
    outcome = asyncio.run(_run(a, b, model, goals, load, asks))
    _print(text_console(json), a, b, outcome)
    if html is not None:
        write_html(html, (a, b), outcome)
    if plot is not None:
        draw(plot, (a, b), outcome)
    write_json(json, _report(a, b, load, goals, outcome))


def _is_address(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def _prompts(load: AbLoad) -> list[str]:
    if load.data is None:
        # Characters stand in for tokens: the servers' tokenizers are not known here.
        found = english_prompts(lambda text: list(map(ord, text)), 1 + load.requests // _LONG_EVERY, _LONG_CHARACTERS)
        chats, long = (["".join(map(chr, prompt)) for prompt in prompts] for prompts in found)
        return [
            long[number // _LONG_EVERY] if number % _LONG_EVERY == _LONG_EVERY - 1 else chats[number % len(chats)]
            for number in range(load.requests)
        ]
    inputs = islice(read_inputs(load.data, load.field, ReadTally()), load.requests)
    prompts = [one.text for one in inputs if not isinstance(one, TraceRequest)]
    if not prompts:
        raise InvalidInput(f"Got --data {str(load.data)!r} but found no prompt in it.")
    return prompts


async def _run(a: str, b: str, model: str | None, goals: Goals, load: AbLoad, asks: list[Ask]) -> Outcome:
    async with AsyncExitStack() as stack:
        llm = None
        if not (_is_address(a) and _is_address(b)):
            with loading(model or "default"):
                # Under a target the engine has step times from the start. A prefix cache would favour second rounds.
                llm = AsyncLLM(model or "default", policy="target:1000ms", enable_prefix_caching=False)
            await stack.enter_async_context(llm)
        ends = [_endpoint(side, model, llm) for side in (a, b)]
        with progress("Starting") as say:
            settings: dict[str, Any] = {"num_pairs": load.pairs, "seed": load.seed, "keep_prompts": load.keep_prompts}
            return await compare(ends[0], ends[1], asks, goals=goals, on_round=say, **settings)


def _endpoint(side: str, model: str | None, llm: AsyncLLM | None) -> Endpoint:
    if not _is_address(side):
        assert llm is not None
        return PolicyEndpoint(side, llm)
    return HttpEndpoint(side.rstrip("/").removesuffix("/v1"), model, os.environ.get("EVENFLOW_API_KEY"))


def _print(console: Console, a: str, b: str, outcome: Outcome) -> None:
    title = f"A: {a}\nB: {b}\n{len(outcome.pairs)} pairs of rounds of {len(outcome.pairs[0].a.answers)} requests"
    table = make_table(title, "", "A", "B", "B / A", f"{CONFIDENCE:.0%} interval", "differ")
    for estimate in outcome.estimates:
        table.add_row(*cells(estimate))
    console.print(table)
    console.print(same_outputs(outcome))
    for found in outcome.differences[:_SHOWN_DIFFERENCES]:
        console.print(
            f"  pair {found.pair + 1}, request {found.request + 1}, from character {found.character} on: "
            f"A {found.a!r}, B {found.b!r}"
        )
    for error in sorted(set(outcome.errors))[:_SHOWN_DIFFERENCES]:
        console.print(f"  failed: {error}")


def _report(a: str, b: str, load: AbLoad, goals: Goals, outcome: Outcome) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "pairs": load.pairs,
        "requests": len(outcome.pairs[0].a.answers),
        "rate": load.rate,
        "max_tokens": load.max_tokens,
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
