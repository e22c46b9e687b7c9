"""An engine's process as the driver sees it: start it, give it a job, get the answer.

A process without a job is stopped, so that its idle threads take nothing from the engine that is measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from peers.protocol import Answer, Job, Setup

BENCHMARKS_FOLDER = Path(__file__).resolve().parent.parent
NUM_LOG_LINES_IN_ERRORS = 5
SECONDS_TO_END = 10


class AdapterFailedError(Exception):
    """The process ended without an answer; the message holds the last lines of its log."""


class AdapterProcess:
    """A running engine."""

    def __init__(self, python: str, adapter: str, setup: Setup, log_path: Path) -> None:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log_path = log_path
        with log_path.open("w") as log:
            # A session of its own, so that its children are stopped and ended with it.
            self._process = subprocess.Popen(
                [python, "-m", adapter],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=_environment(setup.threads),
            )
        self._send(asdict(setup))

    @property
    def session_id(self) -> int:
        """Of the engine and all its children."""
        return self._process.pid

    def run(self, job: Job) -> Answer:
        """The answer to one job; the process is stopped before and after."""
        self._signal(signal.SIGCONT)
        self._send(asdict(job))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AdapterFailedError(self._log_tail())
        self._signal(signal.SIGSTOP)
        return Answer(**json.loads(line))

    def close(self) -> None:
        """End the engine and its children, with time to release shared memory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SECONDS_TO_END)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def _send(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise AdapterFailedError(self._log_tail()) from error

    def _signal(self, number: signal.Signals) -> None:
        # The group holds the engine and its children; it may be gone, or outlive the engine.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _log_tail(self) -> str:
        lines = [line for line in self._log_path.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join(lines[-NUM_LOG_LINES_IN_ERRORS:]) or f"no output; log: {self._log_path}"


def _environment(threads: int) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(BENCHMARKS_FOLDER),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
