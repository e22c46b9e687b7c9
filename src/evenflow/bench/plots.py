"""Plots of the stall benchmark and the demo. Imports matplotlib only when the first one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from evenflow.bench.stall import StallFigures
from evenflow.bench.stall_run import StallRun
from evenflow.bench.timeline import Timeline
from evenflow.errors import MissingDependency


def pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependency("plots need matplotlib, which is not installed: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw_tokens(path: Path, runs: Mapping[str, StallRun], figures: Sequence[StallFigures]) -> None:
    """One row per policy; each token is a dot at its time and gap, and prefill is shaded."""
    plt = pyplot()
    figure, rows = plt.subplots(
        len(figures), 1, figsize=(10, 0.6 + 1.7 * len(figures)), sharex=True, sharey=True, squeeze=False
    )
    for axis, policy in zip(rows[:, 0], figures, strict=True):
        run = runs[policy.policy]
        for chunk in run.prefills:
            axis.axvspan(chunk.start, chunk.end, color="tab:orange", alpha=0.2, linewidth=0)
        axis.plot([token.at for token in run.tokens], [1000 * token.gap for token in run.tokens], ".", markersize=2)
        if policy.target_s is not None:
            axis.axhline(1000 * policy.target_s, color="tab:red", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_ylabel("gap, ms")
        title = f"{policy.policy}: p99 gap beside a prefill {1000 * policy.tbt_p99_s:.0f} ms"
        axis.set_title(title, loc="left", fontsize=9)
    rows[-1, 0].set_xlabel("seconds (dots: tokens, shaded: prefill of long prompts, red: targets)")
    save(figure, path)


def draw_streams(path: Path, timelines: Sequence[Timeline]) -> None:
    """The runs one below the other: a row per stream, a dot per token, a bar per step with its prefill."""
    plt = pyplot()
    num_rows = max(len(timeline.streams) for timeline in timelines)
    size = (10, 0.6 + len(timelines) * (0.5 + 0.3 * num_rows))
    figure, axes = plt.subplots(len(timelines), 1, figsize=size, sharex=True, squeeze=False)
    for axis, timeline in zip(axes[:, 0], timelines, strict=True):
        streams = list(timeline.streams.values())
        for row, stream in enumerate(streams):
            bars = [(start, end - start) for start, end in stream.prefills]
            axis.broken_barh(bars, (row - 0.3, 0.6), color="tab:orange", alpha=0.3, linewidth=0)
            axis.plot(stream.tokens, [row] * len(stream.tokens), "o", markersize=3, color="tab:blue")
        title = f"{timeline.title}: longest pause of a stream {timeline.longest_gap_s:.2f} s"
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_yticks(range(len(streams)), [stream.name for stream in streams])
        axis.set_ylim(len(streams) - 0.4, -0.6)  # the first stream on top
    axes[-1, 0].set_xlabel("seconds (dots: tokens, shaded: prefill)")
    save(figure, path)


def draw_curves(path: Path, figures: Sequence[StallFigures]) -> None:
    """What a lower p99 gap costs: the long prompts' time to first token, and prefill rate."""
    plt = pyplot()
    figure, (ttft, rate) = plt.subplots(1, 2, figsize=(11, 4.5))
    for family, style in (("fixed", "o-"), ("target", "s-"), ("other", "x")):
        members = [policy for policy in figures if _family(policy.policy) == family]
        members.sort(key=lambda policy: policy.tbt_p99_s)
        p99_ms = [1000 * policy.tbt_p99_s for policy in members]
        for axis, values in (
            (ttft, [policy.long_ttft_p50_s for policy in members]),
            (rate, [policy.prefill_tokens_per_s for policy in members]),
        ):
            axis.plot(p99_ms, values, style, markersize=4, label=family)
            for policy, x, y in zip(members, p99_ms, values, strict=True):
                axis.annotate(policy.policy, (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    for axis, label in ((ttft, "a long prompt's TTFT, median, s"), (rate, "prefill, tokens/s")):
        axis.set_xscale("log")
        axis.set_xlabel("p99 gap between tokens beside a prefill, ms")
        axis.set_ylabel(label)
    ttft.legend()
    save(figure, path)


def _family(policy: str) -> str:
    name = policy.partition(":")[0]
    return name if name in ("fixed", "target") else "other"


def save(figure: Any, target: Path | BinaryIO) -> None:
    figure.tight_layout()
    figure.savefig(target, dpi=130)  # PNG, or what a path's extension says
    pyplot().close(figure)
