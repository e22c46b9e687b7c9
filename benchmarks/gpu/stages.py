"""The stages of a benchmark: each says when it begins, its figures are on disk as they come, and one may fail alone."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Stages:
    """Collects figures under names. `path` is written anew after each figure and each failure."""

    def __init__(self, path: Path | None, max_seconds: float | None = None) -> None:
        self._path, self._max_seconds = path, max_seconds
        self._began = time.perf_counter()
        self.found: dict[str, Any] = {"failed": []}

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What fails in it is printed and kept, and the next stage can run."""
        print(f"[{self.seconds:4.0f} s] {name}", flush=True)
        try:
            yield
        except Exception as error:
            print("".join(traceback.format_exception(error)[-3:]), flush=True)
            self.found["failed"].append({"stage": name, "error": f"{type(error).__name__}: {error}"})
            self._write()

    def check_time(self) -> None:
        """Fails a stage that begins too late."""
        if self._max_seconds is not None and self.seconds > self._max_seconds:
            raise TimeoutError(f"not begun: {self._max_seconds:g} s are over")

    def put(self, name: str, value: object) -> None:
        self.found[name] = value
        self._write()

    def add(self, name: str, figure: dict[str, Any], line: str) -> None:
        """One of several figures, and how it is printed."""
        print(line, flush=True)
        self.found.setdefault(name, []).append(figure)
        self._write()

    def exit_status(self) -> int:
        """1 if a stage failed."""
        return int(bool(self.found["failed"]))

    def _write(self) -> None:
        if self._path is not None:
            # A rename: a process that is killed leaves a whole file.
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(json.dumps(self.found, indent=1) + "\n")
            part.replace(self._path)
