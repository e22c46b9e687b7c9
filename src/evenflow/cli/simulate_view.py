"""Tables and pictures of `evenflow simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from evenflow.bench.plots import pyplot, save
from evenflow.cli.output import make_table
from evenflow.counts import counted
from evenflow.simulation.forecast import PERCENTS, Forecast, Sample, percent_name
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Targets
from evenflow.simulation.samples import Interval
from evenflow.simulation.step_times import StepTimes

_TITLES = {"ttft": "first token, s", "gap": "gap between tokens, ms", "latency": "whole answer, s"}
_SCALES = {"ttft": 1.0, "gap": 1000.0, "latency": 1.0}
_MAX_REPLICAS_DRAWN = 4


def print_forecasts(
    console: Console, load: Load, device: StepTimes, targets: Targets, found: Sequence[Forecast]
) -> None:
    console.print(f"Load: {load.name}, {counted(len(load.requests), 'request')} in {load.seconds:.0f} s.")
    for reason, count in load.left_out.items():
        console.print(f"  left out: {count:,} x {reason}")
    console.print(f"Device: {device.name}, {device.about}.")
    table = make_table("With 90% intervals", "", *(one.policy for one in found))
    for kind, title in _TITLES.items():
        for percent in map(percent_name, PERCENTS):
            cells = [cell(one.percentiles[kind][percent], _SCALES[kind]) for one in found]
            table.add_row(f"{title}: {percent}", *cells)
    table.add_row("requests/s", *(cell(one.requests_per_s) for one in found))
    table.add_row("output tokens/s", *(cell(one.tokens_per_s) for one in found))
    if any(targets):
        table.add_row("requests/s within the targets", *(cell(one.goodput) for one in found))
        table.add_row("share of requests within them", *(cell(one.good_share) for one in found))
    table.add_row("prompt tokens from the prefix cache", *(f"{one.prefix_share:.1%}" for one in found))
    table.add_row("KV cache at most", *(f"{one.kv_peak:.0%}" for one in found))
    table.add_row("preemptions", *(str(one.num_preemptions) for one in found))
    console.print(table)
    for one in found:
        if one.sample is not None:
            console.print(_sample_line(one.policy, one.sample))
        if one.unknown is not None:
            console.print(f"{one.policy}: unknown, because {one.unknown}.")
        if one.causes:
            causes = ", ".join(f"{cause} ({count:,})" for cause, count in one.causes.items())
            console.print(f"{one.policy}: {one.late_share:.2%} of the gaps are over the target: {causes}.")
        for reason, count in one.refused.items():
            console.print(f"{one.policy}: {counted(count, 'request')} refused: {reason}.")


def _sample_line(policy: str, sample: Sample) -> str:
    errors = ", ".join(
        f"{name} {_TITLES[kind].partition(',')[0]} {error:.0%}"
        for kind in ("gap", "ttft")
        for name, error in sample.errors[kind].items()
        if name in ("p50", "p99")
    )
    return (
        f"{policy}: {sample.num_simulated} of {sample.num_replicas:,} replicas were simulated. Their choice moves the "
        f"figures by at most this, nine times of ten: {errors}."
    )


def cell(one: Interval, scale: float = 1.0) -> str:
    if one.value is None:
        return "unknown"
    if one.low is None or one.high is None:
        return f"{scale * one.value:.3g}"
    return f"{scale * one.value:.3g} ({scale * one.low:.3g} to {scale * one.high:.3g})"


def draw_percentiles(path: Path | BinaryIO, found: Sequence[Forecast], targets: Targets) -> None:
    """Each policy's percentiles of gaps and of first tokens, with intervals where the table has them."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5))
    for axis, kind, target in ((axes[0], "gap", targets.tbt), (axes[1], "ttft", targets.ttft)):
        for one in found:
            points = [(100 - percent, _SCALES[kind] * value) for percent, value in one.curve.get(kind, ()) if value]
            if not points:
                continue
            [line] = axis.plot(*zip(*points, strict=True), ".-", label=one.policy)
            for percent in PERCENTS:
                at = one.percentiles[kind][percent_name(percent)]
                if at.low is not None and at.high is not None:
                    ends = [_SCALES[kind] * at.low, _SCALES[kind] * at.high]
                    axis.plot([100 - percent] * 2, ends, color=line.get_color(), linewidth=4, alpha=0.4)
        if target is not None:
            axis.axhline(_SCALES[kind] * target, color="tab:red", linewidth=0.8)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.invert_xaxis()
        axis.set_xlabel("percent of samples that are longer")
        axis.set_ylabel(_TITLES[kind])
    axes[0].legend(fontsize=8)
    save(figure, path)


def draw_timeline(path: Path | BinaryIO, found: Sequence[Forecast]) -> None:
    """The first run of each policy: requests that run and wait, and how full the KV cache is."""
    plt = pyplot()
    figure, axes = plt.subplots(len(found), 1, figsize=(10, 0.6 + 2.2 * len(found)), sharex=True, squeeze=False)
    for axis, one in zip(axes[:, 0], found, strict=True):
        cache = axis.twinx()
        for replica in sorted({moment.replica for moment in one.moments})[:_MAX_REPLICAS_DRAWN]:
            moments = [moment for moment in one.moments if moment.replica == replica]
            times = [moment.at for moment in moments]
            axis.plot(times, [moment.num_running for moment in moments], color="tab:blue", linewidth=0.9)
            axis.plot(times, [moment.num_waiting for moment in moments], color="tab:orange", linewidth=0.9)
            cache.plot(times, [100 * moment.kv_share for moment in moments], color="tab:gray", linewidth=0.6)
        axis.set_ylabel("requests")
        cache.set_ylabel("KV cache, %")
        cache.set_ylim(0, 105)
        axis.set_title(one.policy, loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds (blue: running, orange: waiting, gray: KV cache)")
    save(figure, path)
