"""An A/B comparison as a page or a plot: the figures with their intervals, and the distribution of gaps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from evenflow.bench.ab import Outcome
from evenflow.bench.figures import CONFIDENCE, ESTIMATE_COLUMNS, Estimate
from evenflow.bench.html_page import paragraph, picture, table, write_page
from evenflow.bench.plots import pyplot, save
from evenflow.counts import counted


def draw(target: Path | BinaryIO, names: tuple[str, str], outcome: Outcome) -> None:
    """Left: each figure's ratio with its interval. Right: the share of gaps above each length."""
    figure, (ratios, tails) = pyplot().subplots(1, 2, figsize=(12, 4.5))
    _draw_ratios(ratios, names, outcome.estimates)
    _draw_tails(tails, names, outcome)
    save(figure, target)


def _draw_ratios(axis: Any, names: tuple[str, str], estimates: Sequence[Estimate]) -> None:
    for place, estimate in enumerate(reversed(estimates)):
        if estimate.interval is not None:
            color = "tab:red" if estimate.differs else "tab:gray"
            axis.plot(estimate.interval, [place, place], color=color)
            axis.plot([estimate.ratio], [place], "o", color=color)
    axis.set_yticks(range(len(estimates)), [estimate.name for estimate in reversed(estimates)])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlabel(f"B / A, with {CONFIDENCE:.0%} intervals (red: they differ)")
    axis.set_title(f"A: {names[0]}   B: {names[1]}", fontsize=9)


def _draw_tails(axis: Any, names: tuple[str, str], outcome: Outcome) -> None:
    for name, side in zip(names, ("a", "b"), strict=True):
        rounds = [getattr(pair, side) for pair in outcome.pairs]
        gaps = sorted(gap for one in rounds for answer in one.answers for gap in answer.gaps_s)
        axis.plot(gaps, [1 - place / len(gaps) for place in range(len(gaps))], label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("gap between pieces of an answer, s")
    axis.set_ylabel("share of longer gaps")
    axis.legend(fontsize=8)


def write_html(path: Path, names: tuple[str, str], outcome: Outcome) -> None:
    """One self-contained file."""
    a, b = names
    body = (
        paragraph(f"A is {a}, B is {b}. {same_outputs(outcome)}"),
        table(("figure", *ESTIMATE_COLUMNS), [estimate.cells() for estimate in outcome.estimates]),
        picture(
            "Ratios with intervals, and the distribution of gaps on both sides",
            lambda target: draw(target, names, outcome),
        ),
        paragraph(" ".join(figure_notes(outcome))),
    )
    write_page(path, f"{a} against {b}", body)


def figure_notes(outcome: Outcome) -> list[str]:
    """Sentences without which the figures cannot be judged."""
    notes = [str(outcome.goals), outcome.basis]
    if not outcome.is_complete:
        notes.insert(0, f"Interrupted after {len(outcome.pairs)} of {outcome.num_pairs} pairs: the figures are theirs.")
    return notes


def same_outputs(outcome: Outcome) -> str:
    """A sentence on whether both sides gave the same answers."""
    num_same = outcome.num_answers - len(outcome.differences)
    failed = f" {counted(len(outcome.errors), 'request')} failed." if outcome.errors else ""
    if not outcome.differences:
        return f"All {num_same} greedy answers are the same on both sides.{failed}"
    return f"{num_same} of {outcome.num_answers} greedy answers are the same on both sides.{failed}"
