"""Sends log records to standard error, as text or JSON lines, even when it is replaced while the program runs."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, get_args

from evenflow.errors import InvalidInput

STAGE = {"is_stage": True}  # as `extra`: marks a record about a slow part of loading a model

LogFormat = Literal["text", "json"]
FORMAT_VARIABLE = "EVENFLOW_LOG_FORMAT"  # also tells the server's other processes
LEVEL_VARIABLE = "EVENFLOW_LOG_LEVEL"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_PACKAGE = "evenflow"


def with_fields(**fields: Any) -> dict[str, Any]:
    """As `extra`: fields of the record in JSON lines."""
    return {"fields": fields}


class TextFormatter(logging.Formatter):
    """Every line begins with time, level and logger, also the lines of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        start = f"{_time(record)} {record.levelname} {_logger_name(record)}: "
        return "\n".join(start + line for line in super().format(record).splitlines() or [""])


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _time(record),
            "level": record.levelname,
            "logger": _logger_name(record),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).astimezone().isoformat(timespec="milliseconds")


def _logger_name(record: logging.LogRecord) -> str:
    """One name for all modules of this package."""
    return record.name.partition(".")[0] if record.name.startswith(_PACKAGE) else record.name


class StderrHandler(logging.StreamHandler[TextIO]):
    """Looks standard error up for each record: status lines and live pictures replace it, to print above themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _level() -> str:
    level = os.environ.get(LEVEL_VARIABLE, "INFO")
    if level.upper() not in _LEVELS:
        raise InvalidInput(f"Got {LEVEL_VARIABLE}={level!r} but expected one of: {', '.join(_LEVELS)}.")
    return level.upper()


def _handler() -> StderrHandler:
    handler = StderrHandler()
    handler.setFormatter(JsonFormatter() if os.environ.get(FORMAT_VARIABLE) == "json" else TextFormatter())
    return handler


def ensure_logging() -> None:
    """Log to standard error, unless the program has configured logging."""
    logger = logging.getLogger(_PACKAGE)
    if not logger.hasHandlers():
        logger.addHandler(_handler())
        logger.setLevel(_level())


def log_as_server(log_format: LogFormat) -> None:
    """Log all that the server and its libraries have to say, in this process and those that it starts.

    Replaces the handlers of the command, not those of a program that has configured logging.
    """
    assert log_format in get_args(LogFormat)
    os.environ[FORMAT_VARIABLE] = log_format
    root, logger = logging.getLogger(), logging.getLogger(_PACKAGE)
    logger.handlers = [one for one in logger.handlers if not isinstance(one, StderrHandler)]
    logger.setLevel(_level())
    if not logger.hasHandlers():
        root.addHandler(_handler())
