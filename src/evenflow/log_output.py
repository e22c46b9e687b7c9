"""Sends log records to standard error, even when it is replaced while the program runs."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

STAGE = {"is_stage": True}  # as `extra`: marks a record about a slow part of loading a model


class StderrHandler(logging.StreamHandler[TextIO]):
    """Looks standard error up for each record: status lines and live pictures replace it, to print above themselves."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def ensure_logging() -> None:
    """Log to standard error, unless the program has configured logging."""
    logger = logging.getLogger("evenflow")
    if not logger.hasHandlers():
        handler = StderrHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s evenflow: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(os.environ.get("EVENFLOW_LOG_LEVEL", "INFO").upper())
