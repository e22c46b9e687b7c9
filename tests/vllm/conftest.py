from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def caplog_vllm() -> Iterator[list[str]]:
    """What the plug-in logs: vLLM's loggers do not propagate to pytest's."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("vllm.evenflow")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
