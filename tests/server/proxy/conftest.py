from __future__ import annotations

import stat
import sys

import pytest

from tests.server import stand_in_vllm


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A "Python" that runs the stand-in, whichever module it is asked for."""
    path = tmp_path_factory.mktemp("stand-in") / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in_vllm.__file__} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
