"""`evenflow bench mixed` on a tiny model: every policy runs, and the figures add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow.executors.recorded import replay
from tests.cli.running import long_context_llama, run_cli


@pytest.mark.slow
def test_chunk_sizes_a_target_and_no_chunks_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "steps.jsonl"
    arguments = ["--model", long_context_llama(), "--repeat", 2, "--json", "-", "--record", record]
    finished = run_cli(capsys, "bench", "mixed", *arguments)
    assert finished.code == 0, finished.err
    figures = json.loads(finished.out)
    names = [policy["policy"] for policy in figures["policies"]]
    assert names[:3] == ["alternate:32", "alternate:128", "alternate:512"]
    assert names[3].startswith("target:")
    assert names[4:] == ["unchunked"]
    assert "alternate:32 against unchunked:" in figures["expectation"]["verdict"]
    assert all(len(policy["runs_s"]) == 2 for policy in figures["policies"])
    assert figures["expectation"]["verdict"] in " ".join(finished.err.split())
    assert all(name in finished.err for name in names)

    set_policies = [
        event["policy"] for event in map(json.loads, record.read_text().splitlines()) if event.get("event") == "policy"
    ]
    assert set_policies == names * 2
    plans = replay(record)
    assert max(len(plan.decodes) + len(plan.chunks) for plan in plans) <= 5
    assert all(admission.num_cached_tokens == 0 for plan in plans for admission in plan.admissions)


@pytest.mark.slow
def test_other_policies(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", long_context_llama(), "--repeat", 1, "--policies", "fixed:16,load"]
    finished = run_cli(capsys, "bench", "mixed", *arguments)
    assert (finished.code, finished.err) == (0, "")
    last_line = finished.out.rpartition("The expectation")[2]
    assert "fixed:16 against load:" in " ".join(last_line.split())
