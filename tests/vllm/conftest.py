from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times that other tests left behind would change what these see."""
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
