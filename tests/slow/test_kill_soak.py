"""The soak that kills the engine, shortened: every request ends or is told, and the log agrees with the clients."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_llama

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_soak.py"

pytestmark = pytest.mark.slow


def test_the_accounts_add_up(tmp_path: Path) -> None:
    options = ["--streams", "12", "--every", "5", "--seconds", "22", "--json", str(tmp_path / "figures")]
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--model", tiny_llama(), *options], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["kills"] >= 2
    assert figures["log"]["adds_up"]
    assert figures["clients"]["whole"] == figures["log"]["ended"]["length"] > 0
