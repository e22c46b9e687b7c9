"""The report of `evenflow tune`, on the terminal and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

from rich.console import Console

from evenflow.bench.html_page import commands, paragraph, picture, table, write_page
from evenflow.bench.plots import pyplot, save
from evenflow.cli.output import make_table
from evenflow.cli.simulate_view import cell, draw_percentiles
from evenflow.counts import counted
from evenflow.duration import format_duration
from evenflow.simulation.forecast import Forecast
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Targets
from evenflow.simulation.step_times import StepTimes
from evenflow.simulation.tuning import TWICE, Choice

Choices = Mapping[str, Choice]  # by engine


def print_choices(
    console: Console, load: Load, device: StepTimes, targets: Targets, share: float, choices: Choices
) -> None:
    for line in _head(load, device, targets, share):
        console.print(line)
    shown = make_table("With 90% intervals", "", *choices)
    for label, cells in _rows(choices):
        shown.add_row(label, *cells)
    console.print(shown)
    for line in _notes(choices):
        console.print(line)
    for name, choice in choices.items():
        console.print(f"{name}: {choice.candidate.command}")


def write_choices(path: Path, load: Load, device: StepTimes, targets: Targets, share: float, choices: Choices) -> None:
    """One self-contained file."""
    forecasts = [choice.forecast for choice in choices.values()]
    body = [
        *map(paragraph, _head(load, device, targets, share)),
        table(("", *choices), [(label, *cells) for label, cells in _rows(choices)]),
        *map(paragraph, _notes(choices)),
        commands("\n".join(choice.candidate.command for choice in choices.values())),
        picture("Percentiles of gaps and first tokens", lambda to: draw_percentiles(to, forecasts, targets)),
        picture("Requests within the targets as the load grows", lambda to: _draw_ladders(to, share, choices)),
        *(paragraph(f"{name} tried, best first: {_tried(choice)}.") for name, choice in choices.items()),
    ]
    write_page(path, f"A configuration for {load.name}", body)


def _head(load: Load, device: StepTimes, targets: Targets, share: float) -> list[str]:
    wanted = [
        f"{what} within {format_duration(seconds)}"
        for what, seconds in (("gaps", targets.tbt), ("first tokens", targets.ttft))
        if seconds is not None
    ]
    return [
        f"Load: {load.name}, {counted(len(load.requests), 'request')} in {load.seconds:.0f} s.",
        f"Device: {device.name}, {device.about}.",
        f"Goal: {' and '.join(wanted)} for {share:.4g} of the requests.",
    ]


def _rows(choices: Choices) -> list[tuple[str, list[str]]]:
    found = list(choices.values())

    def row(label: str, kind: str, percent: str, scale: float) -> tuple[str, list[str]]:
        return label, [cell(one.forecast.percentiles[kind][percent], scale) for one in found]

    return [
        ("policy", [str(one.candidate.policy) for one in found]),
        ("requests at a time", [str(one.candidate.max_num_seqs) for one in found]),
        ("replicas", [str(one.num_replicas) + " (not enough)" * (not one.is_met) for one in found]),
        ("prefix caching", [_prefix_caching(one.forecast) for one in found]),
        row("gap, ms: p50", "gap", "p50", 1000.0),
        row("gap, ms: p99", "gap", "p99", 1000.0),
        row("first token, s: p50", "ttft", "p50", 1.0),
        row("first token, s: p99", "ttft", "p99", 1.0),
        ("share within the targets", [cell(one.forecast.good_share) for one in found]),
        ("replicas for twice the load", [str(one.replicas_for_twice or "unknown") for one in found]),
    ]


def _prefix_caching(found: Forecast) -> str:
    return f"on: {found.prefix_share:.0%} of the prompts" if found.prefix_share else "on or off: nothing is shared"


def _notes(choices: Choices) -> list[str]:
    notes = []
    for name, one in choices.items():
        if not one.is_met:
            notes.append(f"{name}: no candidate meets the goal; more replicas do not help, or are not allowed.")
        if one.forecast.unknown is not None:
            notes.append(f"{name}: unknown, because {one.forecast.unknown}.")
        notes.append(f"{name}: nearest to its limit: {one.limit}.")
        twice = next((rung for rung in one.ladder if rung.factor == TWICE), None)
        if twice is not None:
            gap, ttft = (cell(twice.forecast.percentiles[kind]["p99"], scale) for kind, scale in _P99_SCALES)
            within = cell(twice.forecast.good_share)
            notes.append(f"{name}: at twice the load: gap p99 {gap} ms, first token p99 {ttft} s, {within} in time.")
        broken = next((rung for rung in one.ladder if rung.breaks is not None), None)
        if broken is not None:
            notes.append(f"{name}: at {broken.factor:g} times the load this breaks first: {broken.breaks}.")
        elif one.ladder:
            notes.append(f"{name}: nothing breaks up to {one.ladder[-1].factor:g} times the load.")
    return notes


_P99_SCALES = (("gap", 1000.0), ("ttft", 1.0))


def _tried(choice: Choice) -> str:
    return "; ".join(f"{name}: {share:.1%}" for name, share in choice.tried)


def _draw_ladders(target: BytesIO, share: float, choices: Choices) -> None:
    figure, axis = pyplot().subplots(figsize=(8, 4))
    for name, choice in choices.items():
        points = [(1.0, choice.forecast), *((rung.factor, rung.forecast) for rung in choice.ladder)]
        known = [(factor, 100 * one.good_share.value) for factor, one in points if one.good_share.value is not None]
        factors, shares = ([one[place] for one in known] for place in (0, 1))
        axis.plot(factors, shares, "o-", label=f"{name}, {counted(choice.num_replicas, 'replica')}")
    axis.axhline(100 * share, color="tab:red", linewidth=0.8)
    axis.set_xlabel("times the load")
    axis.set_ylabel("requests within the targets, %")
    axis.legend(fontsize=8)
    save(figure, target)
