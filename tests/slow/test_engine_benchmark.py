"""The benchmark of the GPU's engine, on a tiny model and the CPU: it runs, and its figures are whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "engine.py"

pytestmark = pytest.mark.slow


def test_all_its_figures_come_out(tmp_path: Path) -> None:
    runs = ["decode", "prefill", "32k=target:2000ms,fixed:512", "--batches", "1,4", "--prompts", "4096"]
    report = tmp_path / "figures.json"
    subprocess.run([sys.executable, SCRIPT, "--tiny", *runs, "--json", report], check=True, timeout=600)
    figures = json.loads(report.read_text())
    assert [(one["what"], one["size"]) for one in figures["steps"]] == [("decode", 1), ("decode", 4), ("prefill", 256)]
    assert all(one["device_s"] > 0 and 0 < one["seconds"] <= one["worst_s"] for one in figures["steps"])
    assert [one["mode"] for one in figures["loads"]] == ["target:2000ms", "fixed:512"]
    assert all(one["num_gaps"] > 0 and one["long_ttft_p50_s"] > 0 for one in figures["loads"])
