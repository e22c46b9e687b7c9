"""What a command writes where: answers and tables, one JSON object, progress, warnings.

With `--json -` standard output belongs to the JSON object alone.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console

from evenflow.model.default_model import default_model_path

SECONDS_BETWEEN_LINES = 30.0  # of progress, in a log


def text_stream(json_target: str | None) -> TextIO:
    """Where a command's text goes."""
    return sys.stderr if json_target == "-" else sys.stdout


def table_console(json_target: str | None) -> Console:
    """For tables, in the place of a command's text; a file is given room for long lines."""
    stream = text_stream(json_target)
    return Console(file=stream, highlight=False, width=None if stream.isatty() else 120)


def write_json(json_target: str | None, figures: Mapping[str, Any]) -> None:
    """Write the object where it was asked for, if it was."""
    if json_target is None:
        return
    text = json.dumps(figures, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    if json_target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(json_target).write_text(text, encoding="utf-8")


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A moving line on standard error while something takes long; call it to change it.

    Where that is no terminal, a log keeps a line of it every half minute.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines_now_and_then()
        return
    with console.status(text) as status:
        yield lambda text: status.update(text)


def _lines_now_and_then() -> Callable[[str], None]:
    next_at = time.monotonic() + SECONDS_BETWEEN_LINES

    def say(text: str) -> None:
        nonlocal next_at
        if time.monotonic() >= next_at:
            next_at = time.monotonic() + SECONDS_BETWEEN_LINES
            print(text, file=sys.stderr, flush=True)

    return say


def loading(model: str) -> AbstractContextManager[Callable[[str], None]]:
    """Progress that begins with the loading of a model. Where it must be fetched first, that shows a bar of its own."""
    if model == "default":
        default_model_path()
    return progress(f"Loading {model}")


def show_warnings_only() -> None:
    """A command says itself what it does; of the engine's log only warnings are worth a line beside that.

    $EVENFLOW_LOG_LEVEL asks for more of it.
    """
    logger = logging.getLogger("evenflow")
    if "EVENFLOW_LOG_LEVEL" in os.environ or logger.hasHandlers():
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("evenflow: %(message)s"))
    # A failed step ends the command with the same error in one line; the traceback is for the log.
    handler.addFilter(lambda record: record.exc_info is None)
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
