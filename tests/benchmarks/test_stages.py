"""The stages of the GPU benchmarks: what one of them loses, and what is on disk by then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stages import Stages


def test_a_stage_that_fails_leaves_the_others_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    stages = Stages(path)
    stages.put("device", "H200")
    with stages.stage("first"):
        stages.add("steps", {"seconds": 1}, "first: 1 s")
        raise RuntimeError("out of memory")
    with stages.stage("second"):
        stages.add("steps", {"seconds": 2}, "second: 2 s")
        assert json.loads(path.read_text())["steps"] == [{"seconds": 1}, {"seconds": 2}]  # before the stage ends
    assert json.loads(path.read_text()) == {
        "failed": [{"stage": "first", "error": "RuntimeError: out of memory"}],
        "device": "H200",
        "steps": [{"seconds": 1}, {"seconds": 2}],
    }
    assert stages.exit_status() == 1
    printed = capsys.readouterr().out
    assert printed.index("s] first") < printed.index("first: 1 s") < printed.index("out of memory")
    assert printed.index("out of memory") < printed.index("s] second")


def test_no_stage_begins_after_the_time_is_over(tmp_path: Path) -> None:
    stages = Stages(tmp_path / "figures.json", max_seconds=0.0)
    with stages.stage("late"):
        stages.check_time()
        stages.put("begun", True)
    assert "begun" not in stages.found
    assert [one["error"] for one in stages.found["failed"]] == ["TimeoutError: not begun: 0 s are over"]
