"""Runs a program that a model wrote, with its tests, under limits on time, memory, files, output and network.

It contains mistakes and clumsy attacks. It is not a full sandbox: docs/eval.md says what it does not stop.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from evenflow.evals.scorers import CORRECT, Verdict

_CHILD = Path(__file__).with_name("sandbox_child.py")
_SHOWN_OUTPUT = 4096  # bytes of its end: the last line says what went wrong
_SHOWN_NOTE = 200
_REPORT_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20  # of any one file, and of all that it prints
    open_files: int = 32

    @property
    def cpu_s(self) -> int:
        """Reached by threads, or if the wall clock is no longer watched."""
        return math.ceil(self.wall_s) + 1


class Ran(NamedTuple):
    """How a program ended, and who kept it from the network and from files: the kernel, or only a Python hook."""

    verdict: Verdict
    guards: str


def run_program(program: str, tests: str, limits: Limits) -> Ran:
    """Correct if the program and then the tests end without an error."""
    token = secrets.token_hex(16)
    report, report_fd = os.pipe()
    job = asdict(limits) | {"program": program, "tests": tests, "token": token, "report_fd": report_fd}
    with tempfile.TemporaryDirectory(prefix="evenflow-answer-") as folder, tempfile.TemporaryFile() as output:
        try:
            code = _run_child(json.dumps(job | {"cpu_s": limits.cpu_s}).encode(), folder, report_fd, output, limits)
        finally:
            os.close(report_fd)
        with os.fdopen(report, "rb") as file:
            first, _, rest = file.read(_REPORT_BYTES).partition(b"\n")
        num_printed = output.seek(0, os.SEEK_END)
        output.seek(max(0, num_printed - _SHOWN_OUTPUT))
        printed = output.read().decode(errors="replace")
    guards = json.loads(first or b"{}")
    described = ", ".join(f"{what}: {'kernel' if guards.get(what) else 'audit hook'}" for what in ("network", "files"))
    if num_printed >= limits.file_bytes:
        return Ran(Verdict(False, f"printed more than {limits.file_bytes >> 10} KiB"), described)
    return Ran(_verdict(code, rest == token.encode(), printed, limits), described)


def _run_child(job: bytes, folder: str, report_fd: int, output: object, limits: Limits) -> int | None:
    """Its exit code; None if it ran out of time. Its whole process group is gone when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.STDOUT,
        cwd=folder,
        env={},
        pass_fds=(report_fd,),
        start_new_session=True,
    )
    try:
        process.communicate(job, timeout=limits.wall_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return int(process.returncode)


def _verdict(code: int | None, has_passed: bool, printed: str, limits: Limits) -> Verdict:
    if code is None or code == -signal.SIGXCPU:
        return Verdict(False, f"ran longer than {limits.wall_s:g} s")
    if code == 0 and has_passed:
        return CORRECT
    if code == 0:
        return Verdict(False, "ended the program before its tests")
    if code < 0:
        return Verdict(False, f"killed by {signal.Signals(-code).name}")
    last = (printed.strip().splitlines() or ["no message"])[-1]
    return Verdict(False, last[:_SHOWN_NOTE])
