"""`evenflow ab` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.running import run_cli
from tests.models import tiny_llama

BAD = {
    "the same twice": (["fixed:8", "fixed:8"], "twice"),
    "unknown policy": (["fixed:8", "fastest"], "policy='fastest'"),
    "one side": (["fixed:8"], "'B'"),
    "no data there": (["fixed:8", "unchunked", "--data", "/no/such/data"], "'/no/such/data'"),
    "one pair": (["fixed:8", "unchunked", "--pairs", 1], "--pairs"),
    "no duration": (["fixed:8", "unchunked", "--tbt-target", "soon"], "'soon'"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_input(arguments: list[object], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "ab", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "ab", "http://127.0.0.1:9", "http://127.0.0.1:10")
    assert (finished.code, finished.out) == (1, "")
    assert "127.0.0.1:9 does not list its models" in finished.err


def test_two_policies_on_own_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {n} " * 6}) + "\n" for n in range(4)))
    arguments = ["--model", tiny_llama(), "--data", data, "--pairs", 2, "--rate", 0, "--max-tokens", 4]
    page = tmp_path / "ab.html"
    finished = run_cli(capsys, "ab", "fixed:8", "unchunked", *arguments, "--json", "-", "--html", page)
    assert finished.code == 0
    report = json.loads(finished.out)
    assert (report["a"], report["b"], report["requests"], report["num_answers"]) == ("fixed:8", "unchunked", 4, 8)
    assert report["identical_outputs"] is True
    assert {estimate["name"] for estimate in report["estimates"]} >= {"TTFT p50, s", "TBT p99, s", "output tokens/s"}
    assert "All 8 greedy answers are the same on both sides." in finished.err
    assert page.exists()
