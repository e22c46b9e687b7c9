"""How long compilation and calls of compiled models took, as a report, a progress display and log lines."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any

from evenflow.compile.model_call import input_shape

logger = logging.getLogger("evenflow")


@dataclass(slots=True)
class CallFigures:
    """Calls of one kind. On a GPU a call returns before its work is done: these are the caller's seconds."""

    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Compilation:
    """How a model was compiled, or why it was not.

    `progress` shows the current stage on standard error; None shows it on a terminal only.
    """

    model_id: str
    mode: str
    progress: InitVar[bool | None] = None
    outcome: str = "plain"  # or "compiled", "loaded from the cache", "recorded as CUDA graphs"
    reason: str | None = None
    seconds: float = 0.0
    stage_seconds: dict[str, float] = field(default_factory=dict)
    package_bytes: int = 0
    largest_difference: float | None = None  # of logits, compiled against plain

    def __post_init__(self, progress: bool | None) -> None:
        self._shows_progress = sys.stderr.isatty() if progress is None else progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self._display(name):
                yield
        finally:
            self.stage_seconds[name] = self.stage_seconds.get(name, 0.0) + time.perf_counter() - started

    def _display(self, stage: str) -> AbstractContextManager[object]:
        if not self._shows_progress:
            return nullcontext()
        from rich.console import Console

        return Console(stderr=True).status(f"Compiling {self.model_id}: {stage}")


@dataclass(slots=True)
class PerformanceMonitor:
    """Figures of one compiler's models."""

    compilations: list[Compilation] = field(default_factory=list)
    calls: dict[str, CallFigures] = field(default_factory=dict)

    def record(self, kind: str, call: Mapping[str, Any], seconds: float) -> None:
        num_sequences, num_tokens = input_shape((), call)
        figures = self.calls.setdefault(kind, CallFigures())
        figures.calls += 1
        figures.tokens += num_sequences * num_tokens
        figures.seconds += seconds

    def report(self) -> dict[str, Any]:
        """All figures as plain data."""
        calls = {kind: asdict(figures) | {"tokens_per_s": figures.tokens_per_s} for kind, figures in self.calls.items()}
        return {"compilations": [asdict(compilation) for compilation in self.compilations], "calls": calls}

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


def warn_once_about(what: str) -> Callable[[str], None]:
    """A function that logs a warning with its reason, once for each reason."""
    return functools.cache(functools.partial(logger.warning, "%s: %s.", what))
