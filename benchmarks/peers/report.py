"""Turns measured seconds into rates, ratios, tables and one JSON object.

Figures use the fastest repeat, because disturbances on a shared machine only ever slow a run down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.table import Table

from peers.measure import NUM_STREAMS, Contestant, Effort, Sample

FIGURES = {
    "prefill_tokens_per_s": "prefill tokens/s",
    "one_stream_tokens_per_s": "1 stream tokens/s",
    "six_streams_tokens_per_s": "6 streams tokens/s",
    "start_up_s": "start-up s",
}
LOWER_IS_BETTER = {"start_up_s"}
Figures = dict[str, float | None]  # None: the measurements were too noisy


def figures_of(contestant: Contestant, effort: Effort) -> Figures:
    """The rates of a contestant that was measured."""
    fastest = {job_name: sample.seconds for job_name, sample in _fastest(contestant).items()}
    num_timed_tokens = effort.num_decode_tokens - 1
    return {
        "prefill_tokens_per_s": effort.num_prefill_tokens / fastest["prefill"],
        "one_stream_tokens_per_s": _rate(num_timed_tokens, fastest["one_all"] - fastest["one_first"]),
        "six_streams_tokens_per_s": _rate(NUM_STREAMS * num_timed_tokens, fastest["six_all"] - fastest["six_first"]),
        "start_up_s": fastest["start_up"],
    }


def _rate(num_tokens: int, seconds: float) -> float | None:
    """Tokens per second; None if all tokens took less time than the first alone, which is noise."""
    return num_tokens / seconds if seconds > 0 else None


def _fastest(contestant: Contestant) -> dict[str, Sample]:
    return {
        job_name: min(samples, key=lambda sample: sample.seconds) for job_name, samples in contestant.samples.items()
    }


def times_faster(ours: Figures, theirs: Figures) -> Figures:
    """How many times faster we are, by figure."""
    ratios: Figures = {}
    for figure in FIGURES:
        our_value, their_value = ours[figure], theirs[figure]
        if our_value is None or their_value is None:
            ratios[figure] = None
        else:
            ratios[figure] = their_value / our_value if figure in LOWER_IS_BETTER else our_value / their_value
    return ratios


def build_report(contestants: Sequence[Contestant], effort: Effort, machine: dict[str, Any]) -> dict[str, Any]:
    """The JSON object: machine, samples and figures, and evenflow against each peer and the best of them."""
    measured = {contestant.name: contestant for contestant in contestants if contestant.problem is None}
    figures = {name: figures_of(contestant, effort) for name, contestant in measured.items()}
    reference = next(iter(measured.values()), None)
    return {
        "machine": machine,
        "effort": asdict(effort),
        "contestants": [
            {
                "name": contestant.name,
                "engine": contestant.engine,
                "weights": contestant.weights,
                "version": contestant.version,
                "problem": contestant.problem,
                "figures": figures.get(contestant.name),
                "samples": {
                    job_name: [asdict(sample) for sample in samples] for job_name, samples in contestant.samples.items()
                },
                "others_share": max((sample.others_share for sample in _fastest(contestant).values()), default=None),
                "num_same_tokens": _num_same_tokens(contestant, reference),
            }
            for contestant in contestants
        ],
        "times_faster": {
            name: _against_peers(contestant, measured, figures)
            for name, contestant in measured.items()
            if contestant.engine == "evenflow"
        },
    }


def _num_same_tokens(contestant: Contestant, reference: Contestant | None) -> int | None:
    """Leading greedy tokens shared with the first contestant: a check that all run the same model."""
    if reference is None or contestant.problem is not None:
        return None
    pairs = zip(contestant.token_ids, reference.token_ids, strict=True)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _against_peers(ours: Contestant, measured: dict[str, Contestant], figures: dict[str, Figures]) -> dict[str, Any]:
    """float32 against float32; 4-bit weights against whatever a peer does fastest."""
    peers = {
        name: figures[name]
        for name, peer in measured.items()
        if peer.engine != "evenflow" and (ours.weights != "float32" or peer.weights == "float32")
    }
    ratios = {name: times_faster(figures[ours.name], theirs) for name, theirs in peers.items()}
    if ratios:
        ratios["best peer"] = {figure: _lowest(ratio[figure] for ratio in ratios.values()) for figure in FIGURES}
    return ratios


def _lowest(ratios: Iterable[float | None]) -> float | None:
    """None unless every peer has a figure."""
    known = list(ratios)
    return None if None in known else min(ratio for ratio in known if ratio is not None)


def print_report(report: dict[str, Any], console: Console) -> None:
    """Figures, ratios, and the problems of contestants without figures.

    `disturbed` is the largest share of the machine that other programs had during a measurement that counts.
    """
    console.print(_figures_table(report))
    for name, ratios in report["times_faster"].items():
        console.print(_ratios_table(name, ratios))
    for entry in report["contestants"]:
        if entry["problem"] is not None:
            console.print(f"{entry['name']}: {entry['problem']}", markup=False, highlight=False, soft_wrap=True)


def _figures_table(report: dict[str, Any]) -> Table:
    effort, machine = report["effort"], report["machine"]
    table = Table(
        title=f"{machine['model']}: prefill of {effort['num_prefill_tokens']} tokens, "
        f"{effort['num_decode_tokens']} tokens decoded, {machine['threads']} threads on {machine['cpu']}",
        caption=", ".join(
            sorted({f"{entry['engine']} {entry['version']}" for entry in report["contestants"] if entry["version"]})
        ),
    )
    table.add_column("engine", no_wrap=True)
    for title in (*FIGURES.values(), "same tokens", "disturbed"):
        table.add_column(title, justify="right", min_width=len(title.split()[-1]))
    for entry in report["contestants"]:
        if entry["figures"] is not None:
            cells = [_cell(entry["figures"][figure], "{:.1f}") for figure in FIGURES]
            same_tokens = f"{entry['num_same_tokens']}/{effort['num_decode_tokens']}"
            disturbed = f"{entry['others_share']:.0%}"
            table.add_row(entry["name"], *cells, same_tokens, disturbed)
    return table


def _ratios_table(name: str, ratios: dict[str, Figures]) -> Table:
    table = Table(title=f"{name}: times faster than")
    table.add_column("peer")
    for title in FIGURES.values():
        table.add_column(title.rsplit(" ", 1)[0], justify="right")
    for peer, ratio in ratios.items():
        table.add_row(peer, *(_cell(ratio[figure], "{:.2f}x") for figure in FIGURES))
    return table


def _cell(value: float | None, style: str) -> str:
    return "noise" if value is None else style.format(value)
