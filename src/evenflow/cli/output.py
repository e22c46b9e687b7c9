"""Where a command's output goes: text and tables, one JSON object, progress, warnings.

With `--json -` standard output holds the JSON object and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE, Box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status
from rich.table import Table

from evenflow.bench.figures import ESTIMATE_COLUMNS, Difference, Estimate
from evenflow.errors import MissingDependency
from evenflow.log_output import LEVEL_VARIABLE, StderrHandler, ensure_logging
from evenflow.model.hub.cached_models import find_model

SHOWN = 3  # of a list of differences, errors or wrong answers
PROGRESS_INTERVAL_S = 30.0  # between lines of progress in a log
_NUMBERS = re.compile(r"\[\n[-+.eE\d,\s]+\]")  # a list of nothing else, such as token ids, is one line; no text has \n
_logger = logging.getLogger("evenflow")
_shown: list[Status] = []  # on the terminal, which has one last line


class _TextConsole(Console):
    """Takes a status line away while it prints: text would be appended to it."""

    def print(self, *objects: Any, **settings: Any) -> None:
        statuses = [*_shown] if self.is_terminal else []
        for status in statuses:
            status.stop()
        super().print(*objects, **settings)
        for status in statuses:
            status.start()


def text_console(json_target: str | None) -> Console:
    """Where a command's text and tables go. Prints strings verbatim, and wraps long lines only on a terminal."""
    stream = sys.stderr if json_target == "-" else sys.stdout
    layout: dict[str, Any] = {} if stream.isatty() else {"width": 120, "soft_wrap": True}
    return _TextConsole(file=stream, highlight=False, markup=False, emoji=False, **layout)


def make_table(title: str, label: str, *figures: str, box: Box = SIMPLE) -> Table:
    """A table with a column of labels and right-aligned columns of figures."""
    table = Table(title=title, title_justify="left", box=box, pad_edge=box is not SIMPLE)
    table.add_column(label, overflow="fold")
    for name in figures:
        table.add_column(name, justify="right")
    return table


def print_estimates(console: Console, title: str, estimates: Iterable[Estimate]) -> None:
    """A row for each figure of two sides, with the interval of its ratio."""
    table = make_table(title, "", *ESTIMATE_COLUMNS)
    for estimate in estimates:
        table.add_row(*estimate.cells())
    console.print(table)


def print_differences(console: Console, differences: Sequence[Difference]) -> None:
    """The first answers that differ, and where."""
    for one in differences[:SHOWN]:
        places = {what: place + 1 if isinstance(place, int) else place for what, place in one.where.items()}
        where = ", ".join(f"{what} {place}" for what, place in places.items())
        console.print(f"  {where}, from character {one.character} on: A {one.a!r}, B {one.b!r}")


def write_json(json_target: str | None, report: Mapping[str, Any]) -> None:
    """Write the report to the target of `--json`, if there is one. Dataclasses become objects."""
    if json_target is None:
        return
    text = json.dumps(report, ensure_ascii=False, indent=2, allow_nan=False, default=_as_json) + "\n"
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text)
    if json_target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(json_target).write_text(text, encoding="utf-8")


def _as_json(value: Any) -> Any:
    return value.as_json() if hasattr(value, "as_json") else asdict(value)


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Show `text` on standard error while the block runs; call the result to replace it.

    A terminal gets a status line, a log gets a line every half minute.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(text) as status:
            _shown.append(status)
            try:
                yield status.update
            finally:
                _shown.remove(status)
        return
    last_line_at = time.monotonic()

    def log_line(text: str) -> None:
        nonlocal last_line_at
        if (now := time.monotonic()) - last_line_at >= PROGRESS_INTERVAL_S:
            last_line_at = now
            print(text, file=sys.stderr, flush=True)

    yield log_line


Say = Callable[[str, int, int], None]  # what is being done, how many parts of it are, and of how many


@contextmanager
def progress_bar(text: str) -> Iterator[Say]:
    """The same with a bar."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with progress(text) as say_line:
            yield lambda text, done, total: say_line(f"{text}: {done} of {total}")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Progress while a model is loaded, with the stages that are logged. A wrong model fails before anything slow.

    If it has to be fetched first, that shows its own progress bar.
    """
    ensure_logging()
    find_model(model)
    with progress(f"Loading {model}") as say:
        stages = _Stages(say)
        _logger.addHandler(stages)
        try:
            yield
        finally:
            _logger.removeHandler(stages)


class _Stages(logging.Handler):
    """Passes on the stages."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "is_stage"):
            self._say(record.getMessage())


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


def log_warnings_only() -> None:
    """Log warnings and errors without tracebacks, unless $EVENFLOW_LOG_LEVEL or the caller has set up logging."""
    if LEVEL_VARIABLE in os.environ or _logger.hasHandlers():
        return
    handler = StderrHandler()
    handler.setFormatter(logging.Formatter("evenflow: %(message)s"))
    # The command ends with the same error in one line.
    handler.addFilter(lambda record: record.exc_info is None)
    handler.setLevel(logging.WARNING)
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)  # for `loading`
