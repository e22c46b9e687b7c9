"""Where a command's output goes: text and tables, one JSON object, progress, warnings.

With `--json -` standard output holds the JSON object and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from rich.box import SIMPLE, Box
from rich.console import Console
from rich.table import Table

from evenflow.errors import MissingDependency
from evenflow.model.default_model import default_model_path

PROGRESS_INTERVAL_S = 30.0  # between lines of progress in a log


def text_console(json_target: str | None) -> Console:
    """Where a command's text and tables go. Prints strings verbatim, and wraps long lines only on a terminal."""
    stream = sys.stderr if json_target == "-" else sys.stdout
    layout: dict[str, Any] = {} if stream.isatty() else {"width": 120, "soft_wrap": True}
    return Console(file=stream, highlight=False, markup=False, emoji=False, **layout)


def make_table(title: str, label: str, *figures: str, box: Box = SIMPLE) -> Table:
    """A table with a column of labels and right-aligned columns of figures."""
    table = Table(title=title, title_justify="left", box=box, pad_edge=box is not SIMPLE)
    table.add_column(label, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right")
    return table


def write_json(json_target: str | None, report: Mapping[str, Any]) -> None:
    """Write the report to the target of `--json`, if there is one. Dataclasses become objects."""
    if json_target is None:
        return
    text = json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False, default=asdict) + "\n"
    if json_target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(json_target).write_text(text, encoding="utf-8")


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` on standard error while the block runs; call the result to replace it.

    A terminal gets a status line, a log gets a line every half minute.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            yield status.update
        return
    last_line_at = time.monotonic()

    def log_line(text: str) -> None:
        nonlocal last_line_at
        if (now := time.monotonic()) - last_line_at >= PROGRESS_INTERVAL_S:
            last_line_at = now
            print(text, file=sys.stderr, flush=True)

    yield log_line


def loading(model: str) -> AbstractContextManager[Callable[[str], None]]:
    """Progress that starts with loading a model. If it has to be fetched first, that shows its own progress bar."""
    if model == "default":
        default_model_path()
    return progress(f"Loading {model}")


@contextmanager
def engine_imports(what: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install."""
    try:
        yield
    except MissingDependency:
        raise
    except ImportError as error:
        raise MissingDependency(
            f"{what} needs {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what standard error is at the moment: a live picture replaces it, to print above itself."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_warnings_only() -> None:
    """Log warnings and errors without tracebacks, unless $EVENFLOW_LOG_LEVEL or the caller has set up logging."""
    logger = logging.getLogger("evenflow")
    if "EVENFLOW_LOG_LEVEL" in os.environ or logger.hasHandlers():
        return
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("evenflow: %(message)s"))
    # The command ends with the same error in one line.
    handler.addFilter(lambda record: record.exc_info is None)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
