"""`evenflow bench`: loads whose figures are compared within one run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from evenflow.bench.mixed import BATCH_SIZE, EXPECTATION, POLICIES, PolicyFigures, Verdict, compare_policies
from evenflow.cli.bench_stall import stall
from evenflow.cli.options import ModelOptions, ReportOptions, knobs, read_policies, takes_options
from evenflow.cli.output import loading, table_console, write_json
from evenflow.config import EngineConfig
from evenflow.engine.llm import LLM

bench = typer.Typer(name="bench", help="Compare policies under a load, on one loaded model.", rich_markup_mode=None)
bench.command()(stall)


@bench.command()
@takes_options
def mixed(
    *,
    policies: Annotated[
        str, Option(metavar="A,B,...", help="Policies to compare, from the smallest chunks to the largest.")
    ] = ",".join(POLICIES),
    repeat: Annotated[int, Option(min=1, help="Runs under each policy, taken in turn.")] = 3,
    model: ModelOptions,
    report: ReportOptions,
) -> None:
    """Three long prompts among ten short ones, five at a time: total time, and what decoding requests felt."""
    names = read_policies(policies, at_least=2)
    settings = knobs(model) | {"policy": names[0], "max_num_seqs": BATCH_SIZE, "enable_prefix_caching": False}
    with loading(model.model) as say, LLM(record=report.record, **settings) as llm:
        figures = compare_policies(llm, names, repeat, on_run=say)
    verdict = Verdict(figures[0], figures[-1])
    console = table_console(report.json)
    console.print(_table(figures))
    console.print(verdict.line())
    write_json(report.json, _report(llm.config, repeat, figures, verdict))


def _table(figures: list[PolicyFigures]) -> Table:
    table = Table("policy", title="Three long prompts among ten short ones, five at a time", title_justify="left")
    gaps = ("p50", "p99", "max")
    for name in ("total", "tokens/s", *(f"gap beside\na prefill, {gap}" for gap in gaps), "gap otherwise,\np50"):
        table.add_column(name, justify="right")
    for policy in figures:
        felt = policy.gap_with_prefill_s
        gaps_s = (felt.p50, felt.p99, felt.max, policy.gap_without_s.p50)
        table.add_row(
            policy.policy,
            f"{policy.total_s:.2f} s",
            f"{policy.output_tokens_per_s:.1f}",
            *(f"{1000 * gap:.0f} ms" for gap in gaps_s),
        )
    return table


def _report(config: EngineConfig, repeat: int, figures: list[PolicyFigures], verdict: Verdict) -> dict[str, Any]:
    return {
        "model": config.model,
        "weights": config.weights,
        "repeat": repeat,
        "policies": [asdict(policy) for policy in figures],
        "expectation": {
            "text": EXPECTATION,
            "held": verdict.held,
            "latency_lower": verdict.is_latency_lower,
            "total_slightly_longer": verdict.is_total_slightly_longer,
            "extra_total": verdict.extra_total,
            "verdict": verdict.line(),
        },
    }
