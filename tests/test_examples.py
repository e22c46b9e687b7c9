"""The examples run as they are written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny_llama

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
def test_streams_beside_a_long_prompt(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "async_streams.py"), str(tiny_llama()), "3"],
        env=os.environ | {"EVENFLOW_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == ["chat 1", "chat 2", "long"]


@pytest.mark.slow
def test_answers_hold_no_marker_of_the_chat_template() -> None:
    line = [sys.executable, str(EXAMPLES / "async_streams.py"), "default", "3"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "<|" not in done.stdout


@pytest.mark.slow
def test_an_evaluation_with_a_compiled_model(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "evaluate_with_compiler.py")],
        env=os.environ | {"EVENFLOW_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "same answers: yes" in done.stdout


def test_a_policy_of_ones_own_is_chosen_by_its_text() -> None:
    line = [sys.executable, str(EXAMPLES / "own_policy.py")]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    steps = done.stdout.splitlines()
    assert steps[0].endswith("432 of long"), "the budget of 512, less four prompts of 20"
    assert steps[1] == "step 1: 4 decodes; prefill: 128 of long"
    assert steps[8] == "step 8: 2 decodes; prefill: 512 of long"
