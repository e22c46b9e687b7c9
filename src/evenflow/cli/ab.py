"""`evenflow ab`: two servers, or two policies of the embedded engine, under the same requests."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from evenflow.bench.ab import CONFIDENCE, Goals, Outcome, compare, make_asks
from evenflow.bench.ab_report import cells, draw, same_outputs, write_html
from evenflow.bench.endpoints import Ask, Endpoint, HttpEndpoint, PolicyEndpoint
from evenflow.bench.plots import pyplot
from evenflow.bench.stall_load import english_prompts
from evenflow.cli.options import JsonTarget, parse_duration, parse_new_file, takes_options
from evenflow.cli.output import loading, progress, table_console, write_json
from evenflow.core.policies import make_policy
from evenflow.errors import InvalidInput, MissingDependency
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

if TYPE_CHECKING:
    from evenflow.engine.async_llm import AsyncLLM

_LONG_EVERY = 6  # one request in so many is a long text, the others are short questions
_LONG_CHARACTERS = 6000  # about 1,500 tokens
_SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AbLoad:
    """What is asked of both."""

    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Prompts: JSONL, JSON, CSV, Parquet or texts.", show_default="chats, long texts"),
    ] = None
    field: Annotated[str | None, Option(help="The field of a record that holds its prompt.")] = None
    requests: Annotated[int, Option(min=1, help="Requests in a round.")] = 24
    rate: Annotated[float, Option(min=0, help="Requests a second, at random moments; 0 sends all at once.")] = 2.0
    max_tokens: Annotated[int, Option(min=1, help="Tokens of an answer.")] = 48
    pairs: Annotated[int, Option(min=2, help="Pairs of rounds.")] = 5
    keep_prompts: Annotated[
        bool, Option("--keep-prompts", help="Send the same prompts in each pair, so that prefix caches can answer.")
    ] = False
    seed: Annotated[int, Option(help="For arrivals, the order of rounds and the intervals.")] = 0


@takes_options
def ab(
    *,
    a: Annotated[str, Argument(metavar="A", help="A server's address (http://...), or a policy.")],
    b: Annotated[str, Argument(metavar="B", help="The same, to compare with A.")],
    load: AbLoad,
    ttft_target: Annotated[
        float, Option(parser=parse_duration, metavar="DURATION", help="A request served well begins within this.")
    ] = "2s",  # type: ignore[assignment]
    tbt_target: Annotated[
        float, Option(parser=parse_duration, metavar="DURATION", help="And 99 of 100 of its gaps are within this.")
    ] = "200ms",  # type: ignore[assignment]
    model: Annotated[
        str | None, Option(metavar="NAME|PATH", help="Of servers: a name; of policies: as for generate.")
    ] = None,
    json: JsonTarget = None,
    html: Annotated[Path | None, Option(parser=parse_new_file, metavar="PATH", help="Write a page there.")] = None,
    plot: Annotated[Path | None, Option(parser=parse_new_file, metavar="PATH", help="Draw a picture there.")] = None,
) -> None:
    """Send the same requests to both in paired, interleaved rounds; say what differs, and how sure that is.

    Servers that need a key get the one in EVENFLOW_API_KEY.
    """
    for side in (a, b):
        if not _is_address(side):
            make_policy(side, 1)
    if a == b:
        raise InvalidInput(f"Got {a!r} twice but expected two that differ.")
    if html is not None or plot is not None:
        pyplot()  # missing it now is better than after the runs
    asks = make_asks(_prompts(load), load.max_tokens, load.rate, load.seed)
    console = table_console(json)
    outcome = asyncio.run(_run(a, b, model, Goals(ttft_target, tbt_target), load, asks))
    console.print(_table(a, b, outcome))
    _print_outputs(console, outcome)
    if html is not None:
        write_html(html, (a, b), outcome)
    if plot is not None:
        draw(plot, (a, b), outcome)
    write_json(json, _report(a, b, load, Goals(ttft_target, tbt_target), outcome))


def _is_address(side: str) -> bool:
    return side.startswith(("http://", "https://"))


def _prompts(load: AbLoad) -> list[str]:
    if load.data is None:
        # Characters stand for tokens: which tokenizer the servers have is not known here.
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
        policies = [side for side in (a, b) if not _is_address(side)]
        llm = await _embedded(stack, model or "default") if policies else None
        ends = [_endpoint(side, model, llm) for side in (a, b)]
        with progress("Starting") as say:
            return await compare(
                ends[0],
                ends[1],
                asks,
                num_pairs=load.pairs,
                goals=goals,
                seed=load.seed,
                keep_prompts=load.keep_prompts,
                on_round=say,
            )


async def _embedded(stack: AsyncExitStack, model: str) -> AsyncLLM:
    from evenflow.engine.async_llm import AsyncLLM

    with loading(model):
        # A target, so that step times are known from the start; no cache, which would serve the second of a pair.
        llm = AsyncLLM(model, policy="target:1000ms", enable_prefix_caching=False)
    return await stack.enter_async_context(llm)


def _endpoint(side: str, model: str | None, llm: AsyncLLM | None) -> Endpoint:
    if not _is_address(side):
        assert llm is not None
        return PolicyEndpoint(side, llm)
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise MissingDependency("asking servers needs httpx, which is not installed: pip install httpx") from error
    address = side.rstrip("/").removesuffix("/v1")
    return HttpEndpoint(address, model, os.environ.get("EVENFLOW_API_KEY"))


def _table(a: str, b: str, outcome: Outcome) -> Table:
    title = f"A: {a}\nB: {b}\n{len(outcome.pairs)} pairs of rounds of {len(outcome.pairs[0].a.answers)} requests"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column("")
    for name in ("A", "B", "B / A", f"{CONFIDENCE:.0%} interval", "differ"):
        table.add_column(name, justify="right")
    for estimate in outcome.estimates:
        table.add_row(*cells(estimate))
    return table


def _print_outputs(console: Console, outcome: Outcome) -> None:
    console.print(same_outputs(outcome))
    for found in outcome.differences[:_SHOWN_DIFFERENCES]:
        console.print(
            f"  pair {found.pair + 1}, request {found.request + 1}, from character {found.character} on: "
            f"A {found.a!r}, B {found.b!r}",
            markup=False,
            soft_wrap=True,
        )
    for error in sorted(set(outcome.errors))[:_SHOWN_DIFFERENCES]:
        console.print(f"  failed: {error}", markup=False, soft_wrap=True)


def _report(a: str, b: str, load: AbLoad, goals: Goals, outcome: Outcome) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "pairs": load.pairs,
        "requests": len(outcome.pairs[0].a.answers),
        "rate": load.rate,
        "max_tokens": load.max_tokens,
        "goals": asdict(goals),
        "confidence": CONFIDENCE,
        "estimates": [
            asdict(estimate) | {"ratio": estimate.ratio, "differs": estimate.differs} for estimate in outcome.estimates
        ],
        "identical_outputs": not outcome.differences,
        "num_answers": outcome.num_answers,
        "differences": [asdict(difference) for difference in outcome.differences],
        "errors": list(outcome.errors),
    }
