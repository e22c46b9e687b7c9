"""Runs the checks of one client and tells each one's outcome.

Runs in the client's own environment, so it has only the standard library. Must not know: evenflow, any client.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

ADDRESS = os.environ.get("EVENFLOW_ADDRESS", "")  # of the server under test, as http://HOST:PORT
MODEL = os.environ.get("EVENFLOW_MODEL_NAME", "")
TOKENIZER = os.environ.get("EVENFLOW_TOKENIZER", "")  # a Hugging Face folder with the model's tokenizer
WORK = Path(os.environ.get("EVENFLOW_WORK", "."))  # files of this run
PROGRAMS = Path(sys.executable).parent  # of the client's environment

Raised = TypeVar("Raised", bound=Exception)

_checks: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Make a function a check: its name says what is so unless it raises."""
    _checks.append(function)
    return function


def raised(kind: type[Raised], call: Callable[[], object]) -> Raised:
    """The error of this kind that the call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def run_checks() -> None:
    """Run all, also after one fails; the exit status says whether any did."""
    num_failed = 0
    for function in _checks:
        outcome = "ok"
        try:
            function()
        except (Exception, SystemExit):
            outcome = "FAILED"
            num_failed += 1
            traceback.print_exc()
        print(f"  {outcome:6} {function.__name__.replace('_', ' ')}", flush=True)
    print(f"{len(_checks) - num_failed} passed, {num_failed} failed", flush=True)
    sys.exit(num_failed > 0)
