"""Draws the pictures of docs/chunked_prefill.md and docs/performance.md: `make pictures`, or with a folder to write to.

The steps of the former are those of evenflow's scheduler, on an executor without a model, in virtual time: a step takes
15 ms, 1 ms for each token of prefill or decode, and a little for each position that they attend to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot

from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.report import StepReport
from evenflow.core.request import SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake, Limits
from evenflow.executors.fake import FakeExecutor
from evenflow.minimal import chunked_attention_mask

DECODE, CHUNK, LATE = "#9aa5b1", "#009485", "#d64545"
CHUNK_COLOURS = ("#009485", "#e08e2b", "#6a5acd")
CONTEXT = 40_000
IMAGES = Path(__file__).resolve().parents[1] / "images"
GPU_RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "runs"


def cost(shape: StepShape) -> float:
    attended = shape.prefill_attention + shape.decode_context
    return 0.015 + 0.001 * (shape.prefill_rows + shape.decode_sequences) + 4e-8 * attended


class Run:
    """Chats that decode, and prompts that arrive, under one policy."""

    def __init__(self, policy: str) -> None:
        executor = FakeExecutor(caps=ExecutorCaps(max_steps_in_flight=1), cost=cost)
        config = SchedulerConfig(num_blocks=20_000, policy=PolicySpec.parse(policy), enable_prefix_caching=False)
        scheduler = Scheduler(config, executor.caps)
        limits = Limits(CONTEXT, 1000)
        self.engine = Engine(scheduler, executor, limits, clock=executor.clock)
        self.intake = Intake(limits, scheduler.block_size, None, clock=executor.clock)

    def add(self, name: str, length: int, max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.engine.add(self.intake.prepare([7] * length, sampling, policy=self.engine.policy, request_id=name))

    def until_idle(self) -> list[StepReport]:
        reports = []
        while (report := self.engine.step()) is not None:
            reports.append(report)
        return reports

    def learn(self) -> None:
        """Let the policy see what steps take, as a server does at its start."""
        for number, length in enumerate((3000, 500, 2000)):
            self.add(f"chat to learn from {number}", 20, 200)
            self.add(f"prompt to learn from {number}", length, 2)
        self.until_idle()

    def load(self) -> list[StepReport]:
        """A chat, and after its eighth token a prompt of 1,500 tokens."""
        self.add("chat", 20, 40)
        reports = [report for _ in range(8) if (report := self.engine.step()) is not None]
        self.add("prompt", 1500, 2)
        return reports + self.until_idle()


def draw_steps(folder: Path) -> None:
    """One prompt beside one chat, in one piece, in fixed chunks, and under a target."""
    policies = ("unchunked", "fixed:512", "target:120ms")
    figure, axes = pyplot.subplots(len(policies), 1, figsize=(9, 4.6), sharex=True)
    for axis, policy in zip(axes, policies, strict=True):
        run = Run(policy)
        run.learn()
        reports = run.load()
        _draw_run(axis, policy, reports)
    axes[-1].set_xlabel("seconds (virtual time)")
    _save(figure, folder / "chunked_steps.svg")


def _draw_run(axis: Any, policy: str, reports: Sequence[StepReport]) -> None:
    began = reports[0].started_at
    for report in reports:
        start = report.started_at - began
        shares = [(report.decode_seconds, DECODE), *[(chunk.seconds, CHUNK) for chunk in report.chunks]]
        for seconds, colour in shares:
            axis.barh(0, seconds, left=start, height=0.8, color=colour, edgecolor="white", linewidth=0.8)
            start += seconds
    tokens = [report.at - began for report in reports if "chat" in report.ids]
    gap, at = max((later - earlier, later) for earlier, later in pairwise(tokens))
    axis.plot(tokens, [0.85] * len(tokens), "|", color="black", markersize=9)
    axis.annotate("", (at - gap, 1.25), (at, 1.25), arrowprops={"arrowstyle": "<->", "color": LATE})
    axis.text(at, 1.4, f"longest wait for a token: {gap:.2f} s ", color=LATE, ha="right" if gap > 1 else "left")
    axis.set(yticks=[], ylim=(-0.5, 2.0))
    axis.set_title(policy, loc="left", fontsize=10, fontweight="bold")
    for side in ("left", "right", "top"):
        axis.spines[side].set_visible(False)


def draw_chunk_sizes(folder: Path) -> None:
    """A prompt of 32,000 tokens beside eight chats: a fixed chunk takes longer and longer, a target shortens it."""
    figure, (sizes, times) = pyplot.subplots(1, 2, figsize=(9, 3.2))
    for policy, colour in (("fixed:512", DECODE), ("target:400ms", CHUNK)):
        run = Run(policy)
        run.learn()
        for number in range(8):
            run.add(f"chat {number}", 20, 400)
        for _ in range(4):
            run.engine.step()
        run.add("prompt", 32_000, 2)
        reports = [report for report in run.until_idle() if report.chunks and report.num_decodes]
        positions = [report.chunks[0].start for report in reports]
        sizes.plot(positions, [report.chunks[0].length for report in reports], color=colour, label=policy)
        times.plot(positions, [1000 * report.seconds for report in reports], color=colour, label=policy)
    sizes.set(xlabel="tokens of the prompt before the chunk", ylabel="tokens of the chunk", ylim=(0, None))
    times.set(xlabel="tokens of the prompt before the chunk", ylabel="milliseconds of the step", ylim=(0, None))
    times.legend(frameon=False)
    _save(figure, folder / "chunk_sizes.svg")


def draw_attention(folder: Path) -> None:
    """What the tokens of three chunks attend to: together the triangle of the whole prompt."""
    chunk, count = 4, 3
    total = chunk * count
    figure, axes = pyplot.subplots(1, count + 1, figsize=(9, 2.6))
    whole = np.full((total, total), np.nan)
    for number in range(count):
        seen = np.array(chunked_attention_mask(number * chunk, chunk, total)) == 0
        rows = np.where(seen, number, np.nan)
        whole[number * chunk : (number + 1) * chunk] = rows
        own = np.full((total, total), np.nan)
        own[number * chunk : (number + 1) * chunk] = rows
        _draw_mask(axes[number], own, f"chunk {number + 1}")
    _draw_mask(axes[count], whole, "together")
    axes[0].set_ylabel("computed token")
    figure.supxlabel("token that it attends to", fontsize=10, y=0.06)
    _save(figure, folder / "chunk_attention.svg")


def draw_gpu_curves(folder: Path) -> None:
    """On a GPU: how late tokens come beside long prompts, and how long those wait, by engine and setting."""
    runs: dict[str, Any] = {}
    for name in ("h200_engine", "h200_hosts"):
        runs |= json.loads((GPU_RUNS / f"{name}.json").read_text())
    vllm = "vllm 0.26, graphs up to 2,048 rows"
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.4))
    kinds = (
        ("evenflow", "evenflow", "target", CHUNK, "o"),
        (vllm, "vLLM with evenflow", "new+target", CHUNK_COLOURS[1], "s"),
        (vllm, "vLLM, fixed budget", "fixed", DECODE, "x"),
    )
    for axis, load in zip(axes, ("32k", "65k"), strict=True):
        for engine, label, mode, colour, marker in kinds:
            points = [one for one in runs[engine]["loads"] if one["load"] == load and mode in one["mode"]]
            points.sort(key=lambda one: one["beside_p99_s"])
            late = [1000 * one["beside_p99_s"] for one in points]
            waits = [one["long_ttft_p50_s"] for one in points]
            axis.plot(late, waits, color=colour, marker=marker, label=label)
            for one, x, y in zip(points, late, waits, strict=True):
                name = one["mode"].partition("+")[2] or one["mode"]
                axis.annotate(name.partition(":")[2], (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
        axis.set(xlabel="p99 of the chats' gaps, ms", ylabel="TTFT of the long prompts, s", ylim=(0, None))
        axis.set_title(f"64 chats and {load.upper()} prompts", fontsize=10)
    axes[0].legend(frameon=False, fontsize=8)
    _save(figure, folder / "gpu_curves.svg")


def _draw_mask(axis: Any, cells: Any, title: str) -> None:
    colours = matplotlib.colors.ListedColormap(CHUNK_COLOURS)
    axis.pcolormesh(cells, cmap=colours, vmin=0, vmax=2, edgecolors="white", linewidth=1)
    axis.invert_yaxis()
    axis.set(xticks=[], yticks=[], aspect="equal")
    axis.set_title(title, fontsize=10)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, facecolor="white", bbox_inches="tight")
    pyplot.close(figure)


def main(folder: Path = IMAGES) -> None:
    matplotlib.use("svg")
    # The same ids in each run, and text that stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "evenflow", "svg.fonttype": "none", "font.size": 10})
    draw_steps(folder)
    draw_chunk_sizes(folder)
    draw_attention(folder)
    draw_gpu_curves(folder)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
