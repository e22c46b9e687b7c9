"""`evenflow demo`: small requests beside large ones on the embedded engine, under a latency target and without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, Literal

from rich.box import HEAVY_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typer import Argument

from evenflow.bench.demo import FIXED_POLICY, DemoRuns, compare_policies, mixed_prompts, simple_prompts
from evenflow.bench.demo_run import DemoRun, DemoRunner
from evenflow.bench.live_load import SEND_S
from evenflow.bench.plots import draw_streams, pyplot
from evenflow.bench.timeline import ASCII_MARKS, UNICODE_MARKS, Timeline, draw
from evenflow.cli.demo_live import run_live
from evenflow.cli.options import (
    ModelOptions,
    ReportOptions,
    SchedulingOptions,
    duration_option,
    engine_facts,
    engine_settings,
    file_option,
    option,
    takes_options,
)
from evenflow.cli.output import loading, make_table, progress, text_console, write_json
from evenflow.config import EngineConfig
from evenflow.engine.llm import LLM
from evenflow.errors import InvalidConfig

Which = Literal["both", "simple", "async"]

_MAX_SECONDS = 55.0  # if all three runs would take longer, the one with a fixed chunk is left out
_OTHER_COLUMNS = 72  # characters that a row of the comparison takes beside the text
_MIN_TEXT = 8
_REFRESHES_PER_S = 5  # drawing takes time from the engine
_NEXT_STEPS = """
Next: `evenflow demo --live` shows every step of such a load on a page, with a slider for the target.
`evenflow serve` keeps a target for OpenAI clients at http://127.0.0.1:8000/v1, with the same page at /.
On a GPU, inside vLLM: `evenflow serve --engine vllm --model MODEL --tbt-target 50ms`.
"""
_FIGURES: dict[str, Callable[[DemoRun], str]] = {
    "longest pause": lambda run: f"{run.longest_gap_s:.2f} s",
    "first, small": lambda run: f"{run.mean_ttft_s('small'):.2f} s",
    "mean small": lambda run: f"{run.mean_latency_s('small'):.2f} s",
    "mean large": lambda run: f"{run.mean_latency_s('large'):.2f} s",
    "all": lambda run: f"{run.total_s:.2f} s",
    "requests/s": lambda run: f"{run.requests_per_s:.2f}",
    "tokens/s out": lambda run: f"{run.output_tokens_per_s:.1f}",
    "tokens/s all": lambda run: f"{run.tokens_per_s:.0f}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What else to show."""

    live: bool = option("Serve, open the live page, and put a load on it.", "--live", default=False)
    load_time: float | None = duration_option("With --live: how long to send requests.", show_default=f"{SEND_S:g}s")
    plot: Path | None = file_option("Plot each stream's tokens, unchunked and under the policy, to this file.")


@takes_options
def demo(
    *,
    which: Annotated[Which, Argument(help="Four prompts, the mixed load, or both.")] = "both",
    options: DemoOptions,
    model: ModelOptions,
    scheduling: SchedulingOptions,
    report: ReportOptions,
) -> None:
    """Show what a latency target does for small requests.

    simple: four prompts of mixed length. async: a large request, three small ones right behind it, and another large
    one while they are answered; unchunked, with a fixed chunk, and under a target that this machine keeps. --policy or
    --tbt-target replaces the target. --live: a server instead, whose page shows long prompts beside chats.
    """
    end_by = time.perf_counter() + _MAX_SECONDS
    settings = engine_settings(model, scheduling)
    if options.live:
        given = {which: which != "both", "--plot": options.plot is not None, "--json": report.json is not None}
        for name, is_given in given.items():
            if is_given:
                raise InvalidConfig(f"Got --live with {name}, where it means nothing: leave one out.")
        load_time = SEND_S if options.load_time is None else options.load_time
        run_live(EngineConfig(**settings), load_time, report.record, text_console(None))
        return
    if options.load_time is not None:
        raise InvalidConfig("Got --load-time without --live, where it means nothing: add --live.")
    if not EngineConfig(**settings).resolve_policy(max_model_len=1).cuts_prompts:
        raise InvalidConfig("Got a policy without chunking but the demo compares chunking with none: give another.")
    if options.plot is not None:
        if which == "simple":
            raise InvalidConfig("Got --plot with the simple demo but only the async one has a plot: leave one out.")
        pyplot()  # if it is missing, fail before the runs
    console = text_console(report.json)
    with loading(settings["model"]):
        llm = LLM(record=report.record, **settings)
    figures: dict[str, Any] = {
        **engine_facts(llm.config),
        "policy": llm.policy,
    }
    if llm.busy_notice:
        console.print(f"{llm.busy_notice}\n")
    with llm:
        if which != "async":
            figures["simple"] = _run_simple(llm, console)
        if which != "simple":
            shows_picture = console.is_terminal and report.json != "-"
            comparison = _compare(llm, console, shows_picture, end_by)
            _show_comparison(console, comparison)
            figures["async"] = _comparison_figures(comparison)
            if options.plot is not None:
                draw_streams(options.plot, [comparison.unchunked.timeline, comparison.chunked.timeline])
    write_json(report.json, figures)


def _run_simple(llm: LLM, console: Console) -> dict[str, Any]:
    with progress("Running four prompts"):
        run = DemoRunner(llm.engine, llm.tokenizer).run(simple_prompts(llm), "simple")
    table = _table(f"Four prompts at once ({llm.policy})", "prompt tokens", "tokens", "latency")
    for answer in run.answers:
        cells = str(answer.prompt_tokens), str(answer.output_tokens), f"{answer.latency_s:.2f} s"
        table.add_row(answer.name, *cells, answer.text)
    console.print(table)
    console.print(f"Total time {run.total_s:.2f} s, {run.output_tokens_per_s:.1f} output tokens/s.\n")
    return _run_figures(run)


def _compare(llm: LLM, console: Console, shows_picture: bool, end_by: float) -> DemoRuns:
    prompts = mixed_prompts(llm)
    if llm.target_reason and (target_s := llm.engine.policy.target) is not None:
        console.print(
            f"The target is {1000 * target_s:.0f} ms between two tokens of a stream: {llm.target_reason}. "
            "--tbt-target sets another."
        )
    with _watching(console, llm, shows_picture) as on_run:
        comparison = compare_policies(DemoRunner(llm.engine, llm.tokenizer, on_run), prompts, end_by)
    if comparison.fixed is None and llm.engine.policy.name != FIXED_POLICY.name:
        console.print(f"No run with {FIXED_POLICY}: on this machine the demo would not end within a minute.")
    return comparison


@contextmanager
def _watching(console: Console, llm: LLM, shows_picture: bool) -> Iterator[Callable[[Timeline], None]]:
    """Shows each run while it runs: a picture, or its name."""
    if shows_picture:
        with live_streams(console, llm.engine.clock) as show:
            yield show
    else:
        with progress("Running small requests beside large ones") as say:
            yield lambda timeline: say(f"Running small requests beside large ones: {timeline.title}")


def _show_comparison(console: Console, comparison: DemoRuns) -> None:
    runs = comparison.runs
    table = _table("Small requests beside large ones", "size", "tokens", *(f"latency\n{run.policy}" for run in runs))
    for answer, *others in zip(*(run.answers for run in runs), strict=True):
        latencies = (f"{one.latency_s:.2f} s" for one in (answer, *others))
        text = shorten(answer.text, max(_MIN_TEXT, console.width - _OTHER_COLUMNS), placeholder=" …")
        table.add_row(answer.name, str(answer.prompt_tokens), str(answer.output_tokens), *latencies, text)
    table.add_section()
    for label, figure in _FIGURES.items():
        table.add_row(label, "", "", *map(figure, runs), "")
    console.print(table)
    arrival_s = comparison.unchunked.last_arrival_s
    console.print(f"{comparison.unchunked.answers[-1].name} arrived {arrival_s:.1f} s after the others in every run.")
    console.print(comparison.gain())
    console.print(_NEXT_STEPS)
    console.print(comparison.verdict(), style="bold")


def _table(title: str, *figures: str) -> Table:
    table = make_table(title, "name", *figures, box=HEAVY_HEAD)
    for column in table.columns:
        column.no_wrap = True
    table.add_column("text", ratio=1)
    return table


def _comparison_figures(comparison: DemoRuns) -> dict[str, Any]:
    return {
        "unchunked": _run_figures(comparison.unchunked),
        "fixed": None if comparison.fixed is None else _run_figures(comparison.fixed),
        "chunked": _run_figures(comparison.chunked),
        "same_text": comparison.same_text,
        "gain": comparison.gain(),
        "verdict": comparison.verdict(),
    }


def _run_figures(run: DemoRun) -> dict[str, Any]:
    return {
        "policy": run.policy,
        "requests": run.answers,
        "last_arrival_s": run.last_arrival_s,
        "longest_gap_s": run.longest_gap_s,
        "mean_small_ttft_s": run.mean_ttft_s("small"),
        "mean_small_latency_s": run.mean_latency_s("small"),
        "mean_large_latency_s": run.mean_latency_s("large"),
        "total_s": run.total_s,
        "requests_per_s": run.requests_per_s,
        "output_tokens_per_s": run.output_tokens_per_s,
        "tokens_per_s": run.tokens_per_s,
    }


@contextmanager
def live_streams(console: Console, clock: Callable[[], float]) -> Iterator[Callable[[Timeline], None]]:
    """Show the timelines given to the result, as they grow. The last picture stays on the terminal."""
    picture = _Picture(clock)
    with Live(picture, console=console, refresh_per_second=_REFRESHES_PER_S):
        yield picture.timelines.append
    console.print()


class _Picture:
    """Drawn anew for each refresh, on a thread of rich."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.timelines: list[Timeline] = []
        self._clock = clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = ASCII_MARKS if options.ascii_only else UNICODE_MARKS
        yield Text(f"{marks.waiting} waits   {marks.prefill} prefill   {marks.token} tokens", style="dim")
        for line in draw(self.timelines, self._clock(), options.max_width, marks):
            text = Text(line, no_wrap=True)
            if marks is UNICODE_MARKS:  # the others are letters of names, too
                for mark, style in ((marks.waiting, "dim"), (marks.prefill, "yellow"), (marks.token, "green")):
                    text.highlight_regex(f"{mark}+", style)
            yield text
