"""The report of `evenflow eval` as tables and sentences, and as one JSON object."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from evenflow import __version__
from evenflow.bench.figures import CONFIDENCE
from evenflow.cli.output import SHOWN, make_table, print_differences, print_estimates
from evenflow.counts import counted
from evenflow.evals.journal import Journal
from evenflow.evals.report import MIN_PAIRS, PairReport, Report, SideReport

_LETTERS = "AB"


def print_report(console: Console, tasks: str, report: Report) -> None:
    _print_sides(console, tasks, report)
    if report.comparison is not None:
        _print_comparison(console, report.comparison)
        if all(side.num_cut_prompts == 0 for side in report.sides):
            console.print("No prompt was cut into chunks: longer prompts would tell more about chunking.")
    for letter, side in zip(_LETTERS, report.sides, strict=False):
        _print_problems(console, letter, side, report)
    for guards in report.guards:
        console.print(f"Programs ran behind these guards: {guards}.")


def _print_sides(console: Console, tasks: str, report: Report) -> None:
    is_pair = len(report.sides) > 1
    names = [
        f"{letter}: {side.name}" if is_pair else side.name for letter, side in zip(_LETTERS, report.sides, strict=False)
    ]
    num_tasks = report.sides[0].num_scored + report.sides[0].num_failed + report.sides[0].num_missing
    table = make_table(f"{tasks}, {counted(num_tasks, 'task')}", "", *names)
    table.add_row("score", *(_score(side) for side in report.sides))
    table.add_row(f"{CONFIDENCE:.0%} interval", *(_percents(side.interval) for side in report.sides))
    table.add_row("correct", *(f"{side.num_correct} of {side.num_scored}" for side in report.sides))
    for name, counts in (
        ("failed, in no score", [side.num_failed for side in report.sides]),
        ("not asked", [side.num_missing for side in report.sides]),
    ):
        if any(counts):
            table.add_row(name, *map(str, counts))
    if any(side.num_cut_prompts is not None for side in report.sides):
        cells = ("-" if side.num_cut_prompts is None else str(side.num_cut_prompts) for side in report.sides)
        table.add_row("prompts in several chunks", *cells)
    if not is_pair:
        for name, value in report.sides[0].figures.items():
            if value:
                table.add_row(name, f"{value:.4g}")
    console.print(table)


def _score(side: SideReport) -> str:
    return "-" if side.score is None else f"{side.score:.1%}"


def _percents(interval: tuple[float, float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"


def _print_comparison(console: Console, found: PairReport) -> None:
    if found.score_difference is None or found.interval is None:
        console.print("No task has an answer of both sides yet.")
        return
    print_estimates(console, "", found.estimates)
    if found.num_pairs < MIN_PAIRS:
        console.print(f"Intervals need {MIN_PAIRS} tasks with answers of both sides.")
    low, high = found.interval
    console.print(
        f"Score, B - A: {100 * found.score_difference:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f}); "
        f"{found.only_a_correct} tasks are correct only on A, {found.only_b_correct} only on B."
    )
    num_same = found.num_pairs - len(found.differences)
    of = "All" if not found.differences else f"{num_same} of"
    console.print(f"{of} {found.num_pairs} answers are the same on both sides.")
    print_differences(console, found.differences)
    if found.largest_logprob_difference is not None:
        console.print(f"Logprobs of choices differ by at most {found.largest_logprob_difference:.2g}.")


def _print_problems(console: Console, letter: str, side: SideReport, report: Report) -> None:
    own = [entry for entry in report.answers if report.sides[entry.side] is side]
    name = f"{letter}: " if len(report.sides) > 1 else ""
    failed = [entry for entry in own if entry.error is not None]
    for entry in failed[:SHOWN]:
        console.print(f"{name}task {entry.task} failed: {entry.error}")
    if side.num_missing:
        were = "was" if side.num_missing == 1 else "were"
        missing = counted(side.num_missing, "task")
        console.print(f"{name}{missing} {were} not asked; the same command with --resume goes on.")
    for entry in [entry for entry in own if entry.note][:SHOWN]:
        console.print(f"{name}task {entry.task} is wrong: {entry.note}")


def report_object(journal: Journal, report: Report) -> dict[str, Any]:
    return {
        "evenflow": __version__,
        "tasks": journal.header.tasks,
        "settings": journal.header.settings,
        "journal": str(journal.path),
        "confidence": CONFIDENCE,
        "sides": [asdict(side) for side in report.sides],
        "comparison": None if report.comparison is None else _comparison_object(report.comparison),
        "errors": report.errors,
        "guards": report.guards,
        "answers": [msgspec.to_builtins(entry) | {"side": report.sides[entry.side].name} for entry in report.answers],
    }


def _comparison_object(found: PairReport) -> dict[str, Any]:
    lists = {"estimates": found.estimates, "differences": found.differences}
    return asdict(found) | lists | {"identical_outputs": not found.differences}
