"""How `evenflow analyze` shows its advice: tables and bars in a terminal, a picture in a file.

Must not know: how advice is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evenflow.advisor.analysis import LONG_CHARACTERS, Analysis, DatasetAnalysis
from evenflow.advisor.decision import Decision
from evenflow.advisor.memory import WHAT_CHUNKS_BOUND
from evenflow.advisor.report import Advice, VllmAdvice

_BAR_CELLS = 40
_PLAIN: dict[str, Any] = {"soft_wrap": True, "markup": False}  # sentences, with names of the user's in them


def print_advice(console: Console, advice: Advice) -> None:
    console.print(_lengths_table(advice))
    for dataset in advice.analysis.datasets:
        _print_remarks(console, dataset)
    console.print()
    console.print(_histogram(advice.analysis))
    context = advice.shape.max_position
    if (share := advice.analysis.lengths.share_over(context)) > 0:
        console.print(f"\n{share:.1%} of the inputs are over the model's context of {context:,}: it refuses them.")
    _print_decision(console, advice)
    console.print(_memory_table(advice))
    console.print(WHAT_CHUNKS_BOUND, **_PLAIN)
    _print_vllm(console, advice.vllm, advice.recommendation.reasons)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _lengths_table(advice: Advice) -> Table:
    analysis, context = advice.analysis, advice.shape.max_position
    thresholds = [f"over\n{threshold:,}" for threshold in analysis.share_over]
    table = _table(
        "Tokens of the inputs", "dataset", "inputs", "mean", "p50", "p95", "max", *thresholds, "of the\ncontext"
    )
    rows: list[tuple[str, Analysis | DatasetAnalysis]] = [(dataset.name, dataset) for dataset in analysis.datasets]
    if len(rows) > 1:
        rows.append((f"all {len(rows)}", analysis))
    for name, part in rows:
        figures = part.tokens
        numbers = (figures.count, round(figures.mean), figures.p50, figures.p95, figures.max)
        shares = (*part.share_over.values(), figures.max / context)
        table.add_row(escape(name), *(f"{number:,}" for number in numbers), *(f"{share:.0%}" for share in shares))
    return table


def _print_remarks(console: Console, dataset: DatasetAnalysis) -> None:
    def say(text: str) -> None:
        console.print(f"{dataset.name}: {text}", **_PLAIN)

    say(f"tokens {dataset.tokens_from}.")
    if dataset.is_cut_short:
        say(f"only the first {dataset.tokens.count:,} inputs were read, as --limit asks; the rest may differ.")
    for what, count in dataset.unusable.items():
        say(f"{count:,} left out: {what}.")
    if (characters := dataset.characters) is not None:
        say(f"{characters.total:,} characters, the longest input has {characters.max:,}.")
    if (output := dataset.output_tokens) is not None:
        say(f"answers have {output.p50:,} tokens in the median, {output.p95:,} at p95, {output.max:,} at most.")
    if (arrivals := dataset.arrivals) is not None:
        say(f"{arrivals.requests_per_s:.1f} requests a second, at most {arrivals.most_in_a_second} within one.")
    if (prefixes := dataset.prefixes) is not None:
        say(
            f"{prefixes.hit_rate:.0%} of the tokens repeat a prefix seen before (in blocks of {prefixes.block_tokens}, "
            f"with an unlimited cache); what is left to compute has {prefixes.uncached.p50:,} tokens in the median, "
            f"{prefixes.uncached.p95:,} at p95."
        )


def _histogram(analysis: Analysis) -> Table:
    table = Table(title="How many inputs are how long", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    table.add_column("tokens", justify="right")
    table.add_column()
    table.add_column(justify="right")
    buckets = analysis.lengths.buckets()
    most = max(bucket.count for bucket in buckets)
    for bucket in buckets:
        bar = "█" * -(-_BAR_CELLS * bucket.count // most)
        table.add_row(f"{bucket.low:,}-{bucket.high - 1:,}", bar, f"{bucket.count / analysis.tokens.count:.1%}")
    return table


def _print_decision(console: Console, advice: Advice) -> None:
    decision, analysis = advice.decision, advice.analysis
    threshold = "" if decision.threshold is None else f", from {decision.threshold:,} tokens on"
    console.print(f"\nChunked prefill: {decision.decision.capitalize()}{threshold} (by the longest: {decision.band}).")
    console.print(f"Why: {decision.reason}.", **_PLAIN)
    if len(analysis.datasets) > 1:
        console.print(
            f"Mean of the {len(analysis.datasets)} datasets' longest inputs: {analysis.mean_of_maxima:,.0f} tokens; "
            f"datasets with one over {LONG_CHARACTERS:,} characters: {analysis.num_with_long_characters}.",
            **_PLAIN,
        )
    console.print("What else would switch it on:")
    for trigger in advice.triggers:
        console.print(f"  {'yes' if trigger.active else 'no':>3}  {trigger.name}: {trigger.reason}", **_PLAIN)


def _memory_table(advice: Advice) -> Table:
    whose = f"{advice.shape.name}{', assumed because no model was given' if advice.is_shape_default else ''}"
    chunk = advice.recommendation.chunk
    title = f"\nMemory of one prompt's prefill, whole -> in chunks of {chunk:,} (modelled; {escape(whose)})"
    columns = ("scores of one\nhead, 32-bit", "the same,\n16-bit", "activations", "prompt_logprobs", "KV cache")
    table = _table(title, "tokens", *columns)
    for row in advice.memory:
        table.add_row(
            f"{row.num_tokens:,}",
            _change(row.scores_whole, row.scores_chunked),
            _change(row.scores_16bit_whole, row.scores_16bit_chunked),
            _change(row.activations_whole, row.activations_chunked),
            _change(row.prompt_logits_whole, row.prompt_logits_chunked),
            _size(row.kv_cache),
        )
    return table


def _change(whole: int, chunked: int) -> str:
    return _size(whole) if whole == chunked else f"{_size(whole)} -> {_size(chunked)}"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB" if value < 1000 else f"{value:,.0f} GB"


def _print_vllm(console: Console, advice: VllmAdvice, reasons: Mapping[str, str]) -> None:
    answer = {True: ": it takes them", False: f": IT REFUSES THEM: {advice.refusal}", None: ""}[advice.accepted]
    console.print(f"\nSettings for vLLM {advice.version} ({advice.source}{answer})", **_PLAIN)
    console.print(f"  {advice.command}", **_PLAIN)
    arguments = ", ".join(f"{name}={value!r}" for name, value in advice.engine_args.items())
    console.print(f"  EngineArgs(model=..., {arguments})", **_PLAIN)
    for name in advice.engine_args:
        console.print(f"  {name}: {reasons[name]}.", **_PLAIN)
    for note in advice.notes:
        console.print(f"  Note: {note}.", **_PLAIN)
    console.print(
        "A fixed budget bounds tokens, not milliseconds. For a latency target: evenflow serve --engine vllm "
        "--tbt-target 50ms, which is vLLM with evenflow's own --scheduler-cls evenflow.vllm.LatencyTargetScheduler.",
        **_PLAIN,
    )


def draw_lengths(path: Path, analysis: Analysis, decision: Decision) -> None:
    """The share of inputs up to each length, one curve a dataset, and the threshold."""
    from evenflow.bench.plots import pyplot

    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for dataset in analysis.datasets:
        lengths, shares = dataset.lengths.cumulative()
        axis.step(lengths, shares, where="post", label=dataset.name)
    if decision.threshold is not None:
        axis.axvline(decision.threshold, color="tab:red", linewidth=0.8, label=f"threshold {decision.threshold:,}")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axis.set_xlabel("tokens of an input")
    axis.set_ylabel("share of the inputs that have at most so many")
    axis.set_ylim(0, 1.02)
    axis.set_title(f"Chunked prefill: {decision.decision}", loc="left")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
