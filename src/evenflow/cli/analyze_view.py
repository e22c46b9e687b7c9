"""How `evenflow analyze` shows its advice: tables and bars in a terminal, a plot in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from evenflow.advisor.analysis import LONG_CHARACTERS, THRESHOLDS, Analysis, DatasetAnalysis
from evenflow.advisor.decision import Chunking, Decision
from evenflow.advisor.lengths import LengthFigures
from evenflow.advisor.memory import LLAMA_3_1_8B, WHAT_CHUNKS_BOUND
from evenflow.advisor.report import Advice, SglangAdvice, VllmAdvice
from evenflow.bench.plots import pyplot, save
from evenflow.cli.output import make_table

_BAR_CELLS = 40
_FIGURES = ("dataset", "inputs", "mean", "p50", "p95", "max")


def print_advice(console: Console, advice: Advice) -> None:
    console.print(_lengths_table(advice))
    if advice.analysis.characters is not None:
        console.print(_characters_table(advice.analysis))
    for dataset in advice.analysis.datasets:
        _print_remarks(console, dataset)
    console.print()
    console.print(_histogram(advice.analysis))
    context = advice.shape.max_position
    if (share := advice.analysis.lengths.share_over(context)) > 0:
        console.print(f"\n{share:.1%} of the inputs are over the model's context of {context:,}, and would be refused.")
    _print_decision(console, advice)
    console.print(_memory_table(advice))
    console.print(WHAT_CHUNKS_BOUND)
    _print_vllm(console, advice.vllm, advice.recommendation.reasons)
    _print_sglang(console, advice.sglang)


def _lengths_table(advice: Advice) -> Table:
    context = advice.shape.max_position
    thresholds = [f"over\n{threshold:,}" for threshold in THRESHOLDS]
    title = f"Input tokens; {advice.shape.name} has a context of {context:,}"
    table = make_table(title, *_FIGURES, *thresholds, "max as share\nof context")
    for name, part in _rows(advice.analysis, advice.analysis.datasets):
        shares = (*map(part.lengths.share_over, THRESHOLDS), part.tokens.max / context)
        table.add_row(name, *_figures(part.tokens), *(f"{share:.0%}" for share in shares))
    return table


def _characters_table(analysis: Analysis) -> Table:
    table = make_table("\nInput characters", *_FIGURES, "total")
    texts = [dataset for dataset in analysis.datasets if dataset.characters is not None]
    for name, part in _rows(analysis, texts):
        if part.characters is not None:
            table.add_row(name, *_figures(part.characters), f"{part.characters.total:,}")
    return table


def _rows(analysis: Analysis, datasets: Sequence[DatasetAnalysis]) -> Iterator[tuple[str, Analysis | DatasetAnalysis]]:
    """Each dataset, and all together if there are several."""
    yield from ((dataset.name, dataset) for dataset in datasets)
    if len(datasets) > 1:
        yield f"all {len(datasets)}", analysis


def _figures(figures: LengthFigures) -> tuple[str, ...]:
    numbers = (figures.count, round(figures.mean), figures.p50, figures.p95, figures.max)
    return tuple(f"{number:,}" for number in numbers)


def _print_remarks(console: Console, dataset: DatasetAnalysis) -> None:
    remarks = [f"tokens {dataset.tokens_from}."]
    if dataset.fields_used:
        remarks.append(f"{dataset.fields_used}.")
    if dataset.is_cut_short:
        remarks.append(f"only the first {dataset.tokens.count:,} inputs were read (--limit); the rest may differ.")
    remarks += [f"{count:,} left out: {what}." for what, count in dataset.unusable.items()]
    if (output := dataset.output_tokens) is not None:
        remarks.append(f"output tokens: median {output.p50:,}, p95 {output.p95:,}, max {output.max:,}.")
    if (arrivals := dataset.arrivals) is not None:
        remarks.append(f"{arrivals.requests_per_s:.1f} requests per second, peak {arrivals.most_in_a_second}.")
    if (prefixes := dataset.prefixes) is not None:
        remarks.append(
            f"{prefixes.hit_rate:.0%} of the tokens repeat a prefix (in blocks of {prefixes.block_tokens}, with an "
            f"unlimited cache); uncached tokens: median {prefixes.uncached.p50:,}, p95 {prefixes.uncached.p95:,}."
        )
    for remark in remarks:
        console.print(f"{dataset.name}: {remark}")


def _histogram(analysis: Analysis) -> Table:
    table = Table(title="Lengths of the inputs", title_justify="left", box=None, pad_edge=False)
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
    console.print(f"\nChunked prefill: {decision.decision.capitalize()}. Band, by longest input: {decision.band}.")
    console.print(f"Why: {decision.reason}.")
    if decision.decision is not Chunking.DISABLED:
        console.print(
            f"Chunks help inputs over {decision.threshold:,} tokens. The settings below use chunks of "
            f"{advice.recommendation.max_per_prompt:,} tokens, so they also cut inputs between these two lengths: vLLM "
            "and SGLang have a setting for the size of a chunk, but no minimum length for chunking."
        )
    if len(analysis.datasets) > 1:
        characters, num_long = analysis.mean_of_maxima_characters, analysis.num_with_long_characters
        in_characters = "" if characters is None else f", {characters:,.0f} characters"
        long = "" if num_long is None else f"; datasets with one over {LONG_CHARACTERS:,} characters: {num_long}"
        console.print(
            f"Mean of the {len(analysis.datasets)} datasets' longest inputs: {analysis.mean_of_maxima:,.0f} tokens"
            f"{in_characters}{long}."
        )
    console.print("Triggers:")
    for trigger in advice.triggers:
        console.print(f"  {'yes' if trigger.active else 'no':>3}  {trigger.name}: {trigger.reason}")


def _memory_table(advice: Advice) -> Table:
    assumed = ", assumed because no model was given" if advice.shape is LLAMA_3_1_8B else ""
    chunk = advice.recommendation.max_per_prompt
    title = (
        f"\nMemory of one prompt's prefill, whole -> in chunks of {chunk:,} (modelled; {advice.shape.name}{assumed})"
    )
    columns = ("scores of one\nhead, 32-bit", "the same,\n16-bit", "activations", "prompt_logprobs", "KV cache")
    table = make_table(title, "tokens", *columns)
    for row in advice.memory:
        names = ("scores", "scores_16bit", "activations", "prompt_logits")
        cells = (_change(getattr(row, f"{name}_whole"), getattr(row, f"{name}_chunked")) for name in names)
        table.add_row(f"{row.num_tokens:,}", *cells, decimal(row.kv_cache))
    return table


def _change(whole: int, chunked: int) -> str:
    return decimal(whole) if whole == chunked else f"{decimal(whole)} -> {decimal(chunked)}"


def _print_vllm(console: Console, advice: VllmAdvice, reasons: Mapping[str, str]) -> None:
    answer = {True: ": it accepts them", False: f": IT REJECTS THEM: {advice.refusal}", None: ""}[advice.accepted]
    console.print(f"\nSettings for vLLM {advice.version} ({advice.source}{answer})")
    arguments = ", ".join(f"{name}={value!r}" for name, value in advice.engine_args.items())
    for line in (advice.command, f"EngineArgs(model=..., {arguments})"):
        console.print(f"  {line}", soft_wrap=True)  # to be copied
    for name in advice.engine_args:
        console.print(f"  {name}: {reasons[name]}.")
    for note in advice.notes:
        console.print(f"  Note: {note}.")
    console.print(f"A fixed budget bounds tokens, not milliseconds. {advice.target}")


def _print_sglang(console: Console, advice: SglangAdvice) -> None:
    console.print(f"\nThe same for SGLang {advice.version} (from its source)")
    console.print(f"  {advice.command}", soft_wrap=True)  # to be copied
    console.print("  --enable-mixed-chunk: without it no stream gets a token until a prompt is done.")
    for note in advice.notes:
        console.print(f"  Note: {note}.")
    console.print(advice.target)


def draw_lengths(path: Path, analysis: Analysis, decision: Decision) -> None:
    """Plot the share of inputs up to each length, one curve per dataset, and the threshold."""
    figure, axis = pyplot().subplots(figsize=(8, 4.5))
    for dataset in analysis.datasets:
        lengths, shares = dataset.lengths.cumulative()
        axis.step(lengths, shares, where="post", label=dataset.name)
    if decision.threshold is not None:
        axis.axvline(decision.threshold, color="tab:red", linewidth=0.8, label=f"threshold {decision.threshold:,}")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
    axis.set_xlabel("input tokens")
    axis.set_ylabel("share of inputs no longer than this")
    axis.set_ylim(0, 1.02)
    axis.set_title(f"Chunked prefill: {decision.decision}", loc="left")
    axis.legend()
    save(figure, path)
