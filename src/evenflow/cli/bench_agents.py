"""`evenflow bench agents`: what turns with a cached prefix wait for while a cold prompt is prefilled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument

from evenflow.bench.agents import AgentFigures, AgentsReport, compare
from evenflow.bench.agents_load import TRACE_MISS_TOKENS, TRACE_REQUESTS, AgentsLoad, Load, TraceLoad
from evenflow.cli.options import ModelOptions, ReportOptions, duration_option, engine_settings, option, takes_options
from evenflow.cli.output import SHOWN, make_table, progress, text_console, write_json
from evenflow.cli.sides import check_sides, open_sides
from evenflow.counts import counted
from evenflow.errors import InvalidInput

_SIDES = ("fixed:2048", "target:250ms")
_OF_TRACE = {"num_requests", "miss_tokens", "speed"}
_DEFAULTS = AgentsLoad()


def _of(spread: str, figure: str) -> Callable[[AgentFigures], float | None]:
    """None if there are no samples."""
    return lambda side: getattr(getattr(side, spread), figure) if getattr(side, spread).count else None


_FIGURES: dict[str, Callable[[AgentFigures], float | None]] = {
    "turns: TTFT p50, s": _of("turn_ttft_s", "p50"),
    "turns: TTFT p99, s": _of("turn_ttft_s", "p99"),
    "turns beside a miss: TTFT p50, s": _of("turn_ttft_beside_miss_s", "p50"),
    "turns beside a miss: TTFT p99, s": _of("turn_ttft_beside_miss_s", "p99"),
    "misses: TTFT p50, s": _of("miss_ttft_s", "p50"),
    "misses: TTFT max, s": _of("miss_ttft_s", "max"),
    "gaps between tokens: p50, s": _of("gap_s", "p50"),
    "gaps between tokens: p99, s": _of("gap_s", "p99"),
    "gaps beside a miss: p50, s": _of("gap_beside_miss_s", "p50"),
    "gaps beside a miss: p99, s": _of("gap_beside_miss_s", "p99"),
    "requests/s": lambda side: side.requests_per_s,
}
_WITHOUT_RATIO: dict[str, Callable[[AgentFigures], str]] = {
    "prompt tokens cached, turns": lambda side: _text(side.cached_turn_share, "{:.1%}"),
    "prompt tokens cached, all": lambda side: _text(side.cached_share, "{:.1%}"),
    "number of turns": lambda side: str(side.turn_ttft_s.count),
    "number of turns beside a miss": lambda side: str(side.turn_ttft_beside_miss_s.count),
    "number of misses": lambda side: str(side.miss_ttft_s.count),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsOptions:
    """The agents, their misses, or a trace instead of both, by the names of the load's settings. None: its default."""

    num_agents: int | None = option(
        "Agents, each in a conversation of its own.", "--agents", min=1, show_default=str(_DEFAULTS.num_agents)
    )
    prefix_tokens: int | None = option(
        "Tokens of the prefix that all agents share.", min=2, show_default=str(_DEFAULTS.prefix_tokens)
    )
    turn_tokens: int | None = option(
        "Tokens that a turn adds, on average.", min=1, show_default=str(_DEFAULTS.turn_tokens)
    )
    answer_tokens: int | None = option(
        "Tokens of an answer, on average.", min=2, show_default=str(_DEFAULTS.answer_tokens)
    )
    think_s: float | None = duration_option(
        "Mean time from an answer to the agent's next turn.", "--think", show_default=f"{_DEFAULTS.think_s:g}s"
    )
    num_misses: int | None = option(
        "Cold prompts in a round.", "--misses", min=1, show_default=str(_DEFAULTS.num_misses)
    )
    miss_tokens: int | None = option(
        "Tokens of a cold prompt; with --trace, uncached tokens that make a prompt a miss.",
        min=1,
        show_default=f"{_DEFAULTS.miss_tokens}, with --trace {TRACE_MISS_TOKENS}",
    )
    miss_pause_s: float | None = duration_option(
        "Mean time from a miss's answer to the next miss.", "--miss-pause", show_default=f"{_DEFAULTS.miss_pause_s:g}s"
    )
    trace: Path | None = option("Replay a trace such as Mooncake's instead.", metavar="PATH")
    num_requests: int | None = option(
        "With --trace: how many of its requests.", "--requests", min=1, show_default=str(TRACE_REQUESTS)
    )
    speed: float | None = option("With --trace: how much faster than recorded.", min=0.0001, show_default="1.0")
    scale: float | None = option("Factor of all lengths.", min=0.0001, show_default="1, or what the context needs")
    repeat: int = option("Rounds on each side, taken in turn.", default=2, min=1)
    seed: int = option("Seed for lengths, pauses and the order of rounds.", default=0)


@takes_options
def agents(
    *,
    sides: Annotated[
        list[str] | None,
        Argument(metavar="[SIDE]", help="Addresses of servers, or policies; the first is the base of the ratios."),
    ] = None,
    options: AgentsOptions,
    model: ModelOptions,
    report: ReportOptions,
) -> None:
    """Measure agents' turns while cold prompts arrive.

    Agents share a long prefix and add a little in each turn, so that nearly all their tokens are cached; now and then a
    long prompt is not. Shows what the turns wait for meanwhile, on the sides given: fixed:2048 and target:250ms unless
    others are named. For servers --model is a model's name, and $EVENFLOW_API_KEY holds the key.
    """
    names = sides or list(_SIDES)
    check_sides(names)
    load = _load(options)
    comparison = asyncio.run(_run(names, load, options, engine_settings(model), report.record))
    _print(text_console(report.json), comparison)
    write_json(report.json, _report(comparison, options))


def _load(options: AgentsOptions) -> Load:
    given = {name: value for name, value in asdict(options).items() if value is not None and name != "seed"}
    of_agents = {name: given[name] for name in asdict(_DEFAULTS).keys() & given.keys()}
    of_trace = {name: given[name] for name in _OF_TRACE & given.keys()}
    if options.trace is None:
        _refuse(of_trace.keys() - of_agents.keys(), "without --trace", "add it")
        return AgentsLoad(**of_agents, seed=options.seed)
    _refuse(of_agents.keys() - of_trace.keys(), "with --trace", "leave one out")
    return TraceLoad.read(options.trace, **of_trace)


def _refuse(settings: Iterable[str], where: str, advice: str) -> None:
    for name in sorted(settings):
        flag = name.removeprefix("num_").removesuffix("_s").replace("_", "-")
        raise InvalidInput(f"Got --{flag} {where}, where it means nothing: {advice}.")


async def _run(
    sides: list[str], load: Load, options: AgentsOptions, settings: dict[str, Any], record: Path | None
) -> AgentsReport:
    async with open_sides(sides, record=record, **settings) as endpoints:
        with progress("Starting") as say:
            return await compare(
                endpoints, load, scale=options.scale, repeat=options.repeat, seed=options.seed, on_progress=say
            )


def _print(console: Console, comparison: AgentsReport) -> None:
    console.print(_table(comparison))
    for name in comparison.text_only:
        console.print(f"{name} takes no token ids and got text: a letter for each token.")
    for side in comparison.figures:
        if side.cached_share is None:
            console.print(
                f"{side.name} does not report cached tokens. vLLM does with --enable-prompt-tokens-details, "
                "SGLang with --enable-cache-report."
            )
        for error in sorted(set(side.errors))[:SHOWN]:
            console.print(f"{side.name}: {counted(side.errors.count(error), 'request')} failed: {error}")


def _table(comparison: AgentsReport) -> Table:
    base, *others = comparison.figures
    table = make_table(comparison.load.title, "", base.name)
    for side in others:
        table.add_column(side.name, justify="right", overflow="fold")
        table.add_column("ratio", justify="right")
    for label, figure in _FIGURES.items():
        cells = [_text(figure(base), "{:.3g}")]
        for side in others:
            cells += [_text(figure(side), "{:.3g}"), _text(_ratio(figure(side), figure(base)), "{:.2f}x")]
        table.add_row(label, *cells)
    for label, text in _WITHOUT_RATIO.items():
        table.add_row(label, text(base), *(cell for side in others for cell in (text(side), "")))
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _report(comparison: AgentsReport, options: AgentsOptions) -> dict[str, Any]:
    base = comparison.figures[0]
    return {
        "load": comparison.load.settings() | {"scale": comparison.scale, "repeat": options.repeat},
        "sides": [
            asdict(side) | {"ratios": {label: _ratio(figure(side), figure(base)) for label, figure in _FIGURES.items()}}
            for side in comparison.figures
        ],
        "text_only": comparison.text_only,
    }
