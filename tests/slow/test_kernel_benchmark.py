"""The benchmark of single kernels, in plain torch on the CPU: it runs, and its figures are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "attention.py"

pytestmark = pytest.mark.slow


def test_all_its_figures_come_out(tmp_path: Path) -> None:
    report = tmp_path / "figures.json"
    subprocess.run([sys.executable, SCRIPT, "--tiny", "--json", report], check=True, timeout=600)
    figures = json.loads(report.read_text())
    whats = [figure["what"].split(",")[0].split(" ")[0] for figure in figures["figures"]]
    assert whats == ["decode", "add_rms_norm", "rope_and_write_kv", "silu_mul", "qkv"]
    assert all(figure["seconds"] > 0 and figure["percent"] > 0 for figure in figures["figures"])
    assert all(value > 0 for value in figures["ceilings"].values())
