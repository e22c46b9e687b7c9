"""Shows which stage a long compilation is in, and for how long, on standard error.

Must not know: what the stages do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stages:
    """Seconds of each stage, shown while they pass where `shown` is set."""

    def __init__(self, title: str, shown: bool | None) -> None:
        self.seconds: dict[str, float] = {}
        self._title = title
        self._shown = sys.stderr.isatty() if shown is None else shown

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self._display(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def _display(self, name: str) -> Iterator[Any]:
        if not self._shown:
            yield None
            return
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            progress.add_task(f"{self._title}: {name}", total=None)
            yield progress
