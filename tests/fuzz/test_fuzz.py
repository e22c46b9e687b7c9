"""A few hundred mutated model files, always the same ones: `python -m tests.fuzz --help` says how to try many more."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenflow.errors import InvalidInput
from evenflow.model import loader
from evenflow.native.build import library
from tests.fuzz.mutants import MANIFEST, SHARES, Mutants
from tests.fuzz.trying import ANSWERED, FINDING, REFUSED, Trial

ROOT = Path(__file__).parent.parent.parent


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.slow
def test_mutated_files_are_refused_or_answer_or_fail_with_a_reason() -> None:
    files = [file for file in SHARES if file != MANIFEST]  # needs the compiler's imports, which take seconds
    done = fuzz("--count", "500", "--seconds", "6", "--seed", "1", "--files", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1" in done.stdout


def test_a_mutant_is_the_same_each_time() -> None:
    for number in range(30):
        first, again = (Mutants(7, "outside", SHARES).make(number) for _ in range(2))
        assert first == again
        assert first != Mutants(8, "outside", SHARES).make(number)


def test_what_the_fuzzer_calls_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Errors of other kinds, and reasons that are not on one line."""
    library()  # before the cache is another folder, where it would be compiled again
    monkeypatch.setenv("EVENFLOW_CACHE", "")
    monkeypatch.setattr(logging.getLogger("evenflow"), "handlers", [])
    trial = Trial(tmp_path / "trial")
    mutants = Mutants(1, "outside", {"config.json": 1})
    outcomes = {trial.run(mutants.make(number), mutants.random(number, "trial"))[0] for number in range(12)}
    assert outcomes == {REFUSED, ANSWERED}
    for error in (KeyError("x"), RecursionError(), MemoryError(), InvalidInput("two\nlines"), InvalidInput("")):

        def fail(path: Path, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(loader, "read_hf_folder", fail)
        assert trial.run(mutants.make(0), mutants.random(0, "trial"))[0] == FINDING
