"""`evenflow demo`: small requests beside large ones on the embedded engine, with and without chunking."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from typer import Argument

from evenflow.bench.demo import (
    Comparison,
    DemoRun,
    compare_chunking,
    mixed_prompts,
    run_at_once,
    simple_prompts,
    with_demo_defaults,
)
from evenflow.cli.options import ModelOptions, ReportOptions, SchedulingOptions, engine_settings, takes_options
from evenflow.cli.output import loading, make_table, text_console, write_json
from evenflow.engine.async_llm import AsyncLLM

Which = Literal["both", "simple", "async"]


@takes_options
def demo(
    *,
    which: Annotated[Which, Argument(help="Four prompts, the mixed load, or both.")] = "both",
    model: ModelOptions,
    scheduling: SchedulingOptions,
    report: ReportOptions,
) -> None:
    """Show what chunking does for small requests beside large ones.

    simple: four prompts of mixed length. async: a large request, three small ones right behind it and another large
    one, under a policy (fixed:96 unless another is given) and then unchunked.
    """
    console = text_console(report.json)
    settings = with_demo_defaults(engine_settings(model, scheduling))
    write_json(report.json, asyncio.run(_run(which, settings, report, console)))


async def _run(which: Which, settings: dict[str, Any], report: ReportOptions, console: Console) -> dict[str, Any]:
    with loading(settings["model"]) as say:
        async with AsyncLLM(record=report.record, **settings) as llm:
            figures: dict[str, Any] = {"model": llm.config.model, "weights": llm.config.weights, "policy": llm.policy}
            if which != "async":
                say("Running four prompts")
                run = await run_at_once(llm, simple_prompts(llm), lambda name: say(f"Finished {name}"))
                _show_simple(console, run)
                figures["simple"] = _run_figures(run)
            if which != "simple":
                say("Running small requests beside large ones, with and without chunking")
                comparison = await compare_chunking(
                    llm, mixed_prompts(llm), lambda name: say(f"Finished {name} ({llm.policy})")
                )
                _show_comparison(console, comparison)
                figures["async"] = {
                    "chunked": _run_figures(comparison.chunked),
                    "unchunked": _run_figures(comparison.unchunked),
                    "same_text": comparison.same_text,
                    "verdict": comparison.verdict(),
                }
    return figures


def _show_simple(console: Console, run: DemoRun) -> None:
    table = _table(f"Four prompts at once ({run.policy})", "prompt tokens", "tokens", "latency")
    for answer in run.answers:
        table.add_row(
            answer.name, str(answer.prompt_tokens), str(answer.output_tokens), f"{answer.latency_s:.2f} s", answer.text
        )
    console.print(table)
    console.print(f"Total time {run.total_s:.2f} s, {run.output_tokens_per_s:.1f} output tokens/s.\n")


def _show_comparison(console: Console, comparison: Comparison) -> None:
    runs = (comparison.chunked, comparison.unchunked)
    table = _table("Small requests beside large ones", "size", "tokens", *(f"latency\n{run.policy}" for run in runs))
    for answer, other in zip(*(run.answers for run in runs), strict=True):
        latencies = (f"{a.latency_s:.2f} s ({_ordinal(a.finish_place)})" for a in (answer, other))
        table.add_row(answer.name, str(answer.prompt_tokens), str(answer.output_tokens), *latencies, answer.text)
    table.add_section()
    for label, cells in (
        ("mean small", [f"{run.mean_latency_s('small'):.2f} s" for run in runs]),
        ("mean large", [f"{run.mean_latency_s('large'):.2f} s" for run in runs]),
        ("all", [f"{run.total_s:.2f} s" for run in runs]),
        ("tokens/s out", [f"{run.output_tokens_per_s:.1f}" for run in runs]),
        ("tokens/s all", [f"{run.tokens_per_s:.0f}" for run in runs]),
    ):
        table.add_row(label, "", "", *cells, "")
    console.print(table)
    console.print(comparison.verdict())


def _table(title: str, *figures: str) -> Table:
    table = make_table(title, "name", *figures, box=HEAVY_HEAD)
    table.add_column("text", ratio=1)
    return table


def _ordinal(place: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(place, f"{place}th")


def _run_figures(run: DemoRun) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "requests": run.answers,
        "mean_small_latency_s": run.mean_latency_s("small"),
        "mean_large_latency_s": run.mean_latency_s("large"),
        "total_s": run.total_s,
        "output_tokens_per_s": run.output_tokens_per_s,
        "tokens_per_s": run.tokens_per_s,
    }
