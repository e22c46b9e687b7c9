"""What a stall run comes to, and whether a policy is better than any fixed budget: TTFT at an equal p99 gap.

Must not know: which engine ran, where.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evenflow.bench.curves import read_off
from evenflow.bench.figures import percentile


@dataclass(frozen=True, slots=True)
class StallPoint:
    """One run: gaps of tokens that came while a long prompt waited for its first token."""

    name: str
    target_s: float | None
    gap_p50_s: float
    gap_p90_s: float
    gap_p99_s: float
    gap_max_s: float
    long_ttft_p50_s: float
    num_gaps: int
    total_s: float


def is_pending(long_spans: Iterable[tuple[float, float]], now: float) -> bool:
    """Did a long prompt wait for its first token then? Each span goes from an arrival to that."""
    return any(start < now <= end for start, end in long_spans)


def pending_gaps(streams: Iterable[Sequence[float]], long_spans: Sequence[tuple[float, float]]) -> list[float]:
    """Gaps between a stream's tokens that ended while a long prompt waited for its first one."""
    return [now - before for moments in streams for before, now in pairwise(moments) if is_pending(long_spans, now)]


def summarise(
    name: str, target_s: float | None, gaps: Sequence[float], ttfts: Sequence[float], total_s: float
) -> StallPoint:
    """The figures of one run."""
    ordered = sorted(gaps)
    p50, p90, p99, largest = (percentile(ordered, share) for share in (50, 90, 99, 100))
    return StallPoint(name, target_s, p50, p90, p99, largest, percentile(sorted(ttfts), 50), len(gaps), total_s)


def table(points: Sequence[StallPoint]) -> str:
    """All runs, and for those with a target how they compare to the curve of those without."""
    fixed = [point for point in points if point.target_s is None]
    lines = [f"{'':24}{'gap p50':>9}{'p90':>9}{'p99':>9}{'max':>9}{'TTFT p50':>10}  p99/target  TTFT/curve"]
    for point in points:
        gaps = (point.gap_p50_s, point.gap_p90_s, point.gap_p99_s, point.gap_max_s)
        line = (
            f"{point.name:24}" + "".join(f"{1000 * gap:9.1f}" for gap in gaps) + f"{1000 * point.long_ttft_p50_s:10.0f}"
        )
        if point.target_s is not None:
            expected = read_off(((f.gap_p99_s, f.long_ttft_p50_s) for f in fixed), point.gap_p99_s)
            ratio = "beyond it" if expected is None else f"{point.long_ttft_p50_s / expected:.3f}"
            line += f"{point.gap_p99_s / point.target_s:12.2f}  {ratio:>10}"
        lines.append(line)
    return "\n".join(lines) + "\n(milliseconds)"
