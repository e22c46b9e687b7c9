from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.importing import VARIABLE, prepare

if VARIABLE not in os.environ:
    collect_ignore_glob = ["test_*.py"]  # runs in vLLM's environment, with SGLang's wheel: make test-sglang


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """SGLang's scheduler with the plug-in loaded as SGLang does; not steered until a test says so."""
    from tests.sglang.driving import make_driver

    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVENFLOW_TBT_TARGET", "50ms")
        patch.setenv("EVENFLOW_CACHE", str(folder / "cache"))
        prepare()
        from sglang.srt.plugins.hook_registry import HookRegistry

        from evenflow.sglang.plugin import load

        load()
        HookRegistry.apply_hooks()
        yield make_driver(folder)


@pytest.fixture(autouse=True)
def _nothing_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times that other tests left behind would change what these see."""
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def logged() -> Iterator[list[str]]:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, logger = Keep(), logging.getLogger("sglang.evenflow")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
