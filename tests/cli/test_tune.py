"""`evenflow tune`: a table, commands, a page, JSON, and one clear line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow.cli import tune
from evenflow.simulation import tuning
from tests.cli.running import run_cli

DEVICE = ("--device", "h200-llama-8b-vllm", "--kv-tokens", 200_000, "--runs", 2)
DRAWN = ("--rate", 8, "--prompt-tokens", "600:0.8", "--output-tokens", "40", "--requests", 15)
GOAL = ("--tbt-target", "50ms", "--ttft-target", "2s")


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_BUDGETS", (2048,))
    monkeypatch.setattr(tune, "_MAX_NUM_SEQS", (64,))
    monkeypatch.setattr(tuning, "_FACTORS", (1.25, 2.0))


@pytest.mark.usefixtures("few_candidates")
def test_each_engine_gets_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    finished = run_cli(capsys, "tune", *DRAWN, *DEVICE, *GOAL, "--engine", "evenflow,vllm", "--html", page)
    assert finished.code == 0, finished.err
    assert "evenflow: evenflow serve --model MODEL --" in finished.out
    assert "vllm: vllm serve MODEL --max-num-batched-tokens " in finished.out
    assert "Goal: gaps within 50ms and first tokens within 2000ms for 0.99 of the requests." in finished.out
    assert "nearest to its limit:" in finished.out
    assert "at twice the load:" in finished.out
    text = page.read_text()
    assert text.count("data:image/png;base64,") == 2
    assert "vllm serve MODEL --max-num-batched-tokens" in text


@pytest.mark.usefixtures("few_candidates")
def test_the_report_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "tune", *DRAWN, *DEVICE, *GOAL, "--engine", "sglang", "--json", "-")
    assert finished.code == 0, finished.err
    report = json.loads(finished.out)
    choice = report["choices"]["sglang"]
    assert choice["candidate"]["command"].startswith("python -m sglang.launch_server --model-path MODEL")
    assert choice["num_replicas"] == 1
    assert choice["is_met"] is True
    p99 = choice["forecast"]["percentiles"]["gap"]["p99"]
    assert p99["low"] <= p99["value"] <= p99["high"] < 0.05
    assert [rung["factor"] for rung in choice["ladder"]] == [1.25, 2.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*DRAWN, *DEVICE), "Got no target"),
        ((*DRAWN, *DEVICE, *GOAL, "--engine", "tgi"), "evenflow,vllm,sglang"),
        ((*DRAWN, *DEVICE, *GOAL, "--engine", "vllm,vllm"), "each once"),
        ((*DRAWN, *DEVICE, *GOAL, "--share", 2), "--share"),
        ((*DRAWN, *DEVICE, *GOAL, "--router", "random"), "round-robin"),
        ((*DRAWN, "--device", "TPU", "--kv-tokens", 1000, *GOAL), "'TPU' but it is unknown"),
        (("nowhere.csv", *DEVICE, *GOAL), "no such file"),
        (("EMPTY", *DEVICE, *GOAL), "it is empty"),
        (("COLUMNS", *DEVICE, *GOAL), "no field such as"),
        ((*DEVICE, *GOAL), "Got no trace"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[object, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"EMPTY": tmp_path / "empty.csv", "COLUMNS": tmp_path / "columns.csv"}
    files["EMPTY"].write_text("")
    files["COLUMNS"].write_text("a,b\n1,2\n")
    finished = run_cli(capsys, "tune", *(files.get(str(one), one) for one in arguments))
    assert (finished.code, finished.out) == (2, "")
    [line] = finished.err.splitlines()
    assert message in line
