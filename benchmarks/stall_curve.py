"""A table of stall runs, and whether a target beats every fixed budget: TTFT at an equal p99 gap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from evenflow.bench.curves import read_off
from evenflow.bench.stall_run import ClientFigures


def to_json(point: ClientFigures) -> dict[str, Any]:
    """The figures by the names that recorded results have."""
    renamed = {name.replace("tbt_", "gap_"): figure for name, figure in asdict(point).items()}
    return {"name": renamed.pop("policy")} | renamed


def table(points: Sequence[ClientFigures]) -> str:
    """All runs; those with a target beside the curve of those without."""
    fixed = [(point.tbt_p99_s, point.long_ttft_p50_s) for point in points if point.target_s is None]
    lines = [f"{'':24}{'gap p50':>9}{'p90':>9}{'p99':>9}{'max':>9}{'TTFT p50':>10}{'max':>9}  p99/target  TTFT/curve"]
    for point in points:
        gaps = (point.tbt_p50_s, point.tbt_p90_s, point.tbt_p99_s, point.tbt_max_s)
        line = f"{point.policy:24}" + "".join(f"{1000 * gap:9.1f}" for gap in gaps)
        line += f"{1000 * point.long_ttft_p50_s:10.0f}{1000 * point.long_ttft_max_s:9.0f}"
        if point.target_s is not None:
            expected = read_off(fixed, point.tbt_p99_s)
            ratio = "outside" if expected is None else f"{point.long_ttft_p50_s / expected:.3f}"
            line += f"{point.tbt_p99_s / point.target_s:12.2f}  {ratio:>10}"
        lines.append(line)
    return "\n".join(lines) + "\n(milliseconds)"
