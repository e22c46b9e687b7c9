"""`evenflow bench`: compares policies under a load, within one run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.table import Table
from typer import Option

from evenflow.bench.mixed import (
    BATCH_SIZE,
    CHUNK_SIZES,
    EXPECTATION,
    PolicyFigures,
    Verdict,
    compare_policies,
    default_policies,
)
from evenflow.cli.bench_agents import agents
from evenflow.cli.bench_stall import stall
from evenflow.cli.help import PanelCommand
from evenflow.cli.interrupts import stopping_after_step
from evenflow.cli.options import (
    ModelOptions,
    ReportOptions,
    engine_facts,
    engine_settings,
    read_policies,
    takes_options,
)
from evenflow.cli.output import loading, make_table, progress, text_console, write_json
from evenflow.engine.llm import LLM

bench = typer.Typer(name="bench", help="Compare policies under a load, on one loaded model.", rich_markup_mode=None)
bench.command(cls=PanelCommand)(stall)
bench.command(cls=PanelCommand)(agents)


@bench.command(cls=PanelCommand)
@takes_options
def mixed(
    *,
    policies: Annotated[
        str | None,
        Option(
            metavar="A,B",
            help="Policies to compare, from the smallest chunks to the largest.",
            show_default=f"{', '.join(CHUNK_SIZES)}, the engine's own target, unchunked",
        ),
    ] = None,
    repeat: Annotated[int, Option(min=1, help="Runs under each policy, taken in turn.")] = 3,
    model: ModelOptions,
    report: ReportOptions,
) -> None:
    """Measure three long prompts among ten short ones.

    Five requests run at a time. Shows the total time, and the gaps between tokens of the requests that decode.
    """
    settings = engine_settings(model) | {"max_num_seqs": BATCH_SIZE, "enable_prefix_caching": False}
    given = None if policies is None else read_policies(policies, at_least=2)
    if given is not None:
        settings["policy"] = given[0]
    with loading(model.model):
        llm = LLM(record=report.record, **settings)
    if llm.busy_notice:
        print(llm.busy_notice, file=sys.stderr)
    with stopping_after_step(), llm, progress("Starting") as say:
        # Without a policy, the engine has chosen a target.
        figures = compare_policies(llm, given or default_policies(llm.engine.policy), repeat, on_run=say)
    verdict = Verdict(figures[0], figures[-1])
    console = text_console(report.json)
    console.print(_table(figures))
    console.print(verdict.line())
    expectation = {
        "text": EXPECTATION,
        "held": verdict.held,
        "latency_lower": verdict.is_latency_lower,
        "total_slightly_longer": verdict.is_total_slightly_longer,
        "extra_total": verdict.extra_total,
        "verdict": verdict.line(),
    }
    run = engine_facts(llm.config) | {"repeat": repeat}
    write_json(report.json, run | {"policies": figures, "expectation": expectation})


def _table(figures: list[PolicyFigures]) -> Table:
    gaps = [f"gap beside\na prefill, {name}" for name in ("p50", "p99", "max")]
    title = "Three long prompts among ten short ones, five at a time"
    table = make_table(title, "policy", "total", "tokens/s", *gaps, "gap otherwise,\np50")
    for policy in figures:
        beside_prefill = policy.gap_with_prefill_s
        gaps_s = (beside_prefill.p50, beside_prefill.p99, beside_prefill.max, policy.gap_without_s.p50)
        cells = (f"{policy.total_s:.2f} s", f"{policy.output_tokens_per_s:.1f}")
        table.add_row(policy.policy, *cells, *(f"{1000 * gap:.0f} ms" for gap in gaps_s))
    return table
