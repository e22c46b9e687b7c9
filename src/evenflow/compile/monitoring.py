"""Counts what calls of a compiled model took, and puts it into a report.

Must not know: models. On a GPU a call returns before its work is done, so that seconds are those of the caller.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class CallFigures:
    """Calls of one kind."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class CompilationFigures:
    """How a model came to be compiled, or why it is not."""

    model_id: str
    mode: str
    outcome: str  # "compiled", "loaded from the cache" or "plain"
    reason: str | None
    seconds: float
    stage_seconds: dict[str, float]
    package_bytes: int
    largest_difference: float | None  # of logits, compiled against plain


@dataclass(slots=True)
class PerformanceMonitor:
    """What one compiler's models did."""

    compilations: list[CompilationFigures] = field(default_factory=list)
    calls: dict[str, CallFigures] = field(default_factory=dict)

    def record(self, kind: str, num_tokens: int, seconds: float) -> None:
        figures = self.calls.setdefault(kind, CallFigures())
        figures.calls += 1
        figures.tokens += num_tokens
        figures.seconds += seconds

    def report(self) -> dict[str, Any]:
        """All figures as plain data."""
        calls = {kind: asdict(figures) | {"tokens_per_s": figures.tokens_per_s} for kind, figures in self.calls.items()}
        return {"compilations": [asdict(figures) for figures in self.compilations], "calls": calls}

    def __str__(self) -> str:
        lines = []
        for done in self.compilations:
            why = f" ({done.reason})" if done.reason else ""
            stages = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in done.stage_seconds.items())
            lines.append(f"{done.model_id}, mode {done.mode}: {done.outcome}{why} in {done.seconds:.1f} s: {stages}")
        for kind, figures in self.calls.items():
            rate = f"{figures.tokens_per_s:,.0f} tokens/s"
            lines.append(f"{kind}: {figures.calls:,} calls, {figures.tokens:,} tokens, {figures.seconds:.2f} s, {rate}")
        return "\n".join(lines)
