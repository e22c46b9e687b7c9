"""Runs a program that a model wrote, and judges it by its tests, under limits on time, memory, files and network.

The tests run in another process than the answer, which the answer cannot reach. docs/eval.md says what keeps it so.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from evenflow.evals import judge
from evenflow.evals.jail import Guards
from evenflow.evals.scorers import CORRECT, Verdict
from evenflow.evals.task_names import task_names

_SOURCES = str(Path(__file__).parents[2])
_START_S = 60.0  # for the judge to set up its guards; an answer's time begins after that
_CLEAN_UP_S = 60.0  # on a busy machine; deep folders take a second on an idle one
_KILL_S = 1.0
_MAX_LINE = 1 << 16
_MAX_GENERATIONS = 100  # of processes that start others while they are ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    memory_bytes: int = 512 << 20
    file_bytes: int = 1 << 20  # of any one file
    open_files: int = 32

    @property
    def cpu_s(self) -> int:
        """Reached by threads, or if the wall clock is no longer watched."""
        return math.ceil(self.wall_s) + 1


class Ran(NamedTuple):
    """How a program ended, and what kept it from its judge, other processes, the network and files."""

    verdict: Verdict
    guards: str


def run_program(
    program: str,
    tests: str,
    limits: Limits,
    *,
    prefix: str = "",
    without: Collection[str] = (),
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Ran:
    """Correct if the program and then its tests end without an error.

    `prefix` is the task's own part of the program. `without` names guards to do without, as on a machine that has none.
    Who kills what `on_start` gets ends the run early.
    """
    job = {"program": program, "tests": tests} | asdict(task_names(prefix, tests))
    arguments = json.dumps([os.getpid(), asdict(limits) | {"cpu_s": limits.cpu_s}, sorted(without)])
    own = _Own.now()
    with _own_folder() as folder:
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(job).encode())
            file.seek(0)
            process = subprocess.Popen(
                [*_python(judge.main), arguments],
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,
            )
        assert process.stdout is not None
        with process.stdout as report:
            try:
                on_start(process)
                if not (first := _read_line(report.fileno(), _START_S)):
                    raise OSError("the process that judges answers did not start")
                second = _read_line(report.fileno(), limits.wall_s)
            finally:
                _end(process)
    guards = Guards(*json.loads(first))
    if not (guards.namespaces or guards.seccomp) and own != _Own.now():
        verdict = Verdict(False, f"changed evenflow's own priority or cores, {own.restore()}")
    elif not second:
        verdict = Verdict(False, f"ran longer than {limits.wall_s:g} s" if second is None else "ended its judge")
    else:
        found = json.loads(second)
        verdict = CORRECT if found["is_correct"] is True else Verdict(False, found["note"])
    return Ran(verdict, guards.describe())


@contextmanager
def _own_folder() -> Iterator[str]:
    """Empty already at the end if it was a disk of the answer's own; else a process without rights empties it."""
    folder = tempfile.mkdtemp(prefix="evenflow-answer-")
    try:
        yield folder
    finally:
        try:
            os.rmdir(folder)
        except OSError:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    _python(judge.clean_up),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd=folder,
                    env={},
                    timeout=_CLEAN_UP_S,
                    check=False,
                )
                os.rmdir(folder)


def _python(function: Callable[[], None]) -> list[str]:
    """A Python without site packages, environment or written files that runs a function of the judge."""
    name = function.__name__
    start = f"import sys; sys.path.insert(0, {_SOURCES!r}); from evenflow.evals.judge import {name} as run"
    return [sys.executable, "-I", "-S", "-B", "-c", f"{start}; del sys.path[0]; run()"]


def _read_line(descriptor: int, seconds: float) -> bytes | None:
    """Empty if the judge has ended; None if it takes longer."""
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        part = os.read(descriptor, 1 if len(line) < _MAX_LINE else 0)
        if not part:
            return b""
        line += part
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """The judge and all below it, also what left its session: the judge adopts orphans, so they are found from it."""
    for _ in range(_MAX_GENERATIONS):
        if not (below := _processes_below(process.pid)):
            break
        for one in below:
            _kill(one)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill(process: int) -> None:
    """Gone when this returns, unless the kernel takes long."""
    with suppress(OSError):
        handle = os.pidfd_open(process)
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            select.select([handle], [], [], _KILL_S)
        finally:
            os.close(handle)


def _processes_below(process: int) -> list[int]:
    """Those that still run. None where the system does not say."""
    found, waiting = [], [process]
    while waiting:
        for place in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
            with suppress(OSError):
                waiting += (children := [int(child) for child in place.read_text().split()])
                found += [child for child in children if _is_running(child)]
    return found


def _is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class _Own(NamedTuple):
    """What a process of the same user could change of this one where the kernel does not keep it from that."""

    priority: int
    cores: frozenset[int]

    @classmethod
    def now(cls) -> _Own:
        cores = os.sched_getaffinity(os.getpid()) if sys.platform == "linux" else ()
        return cls(os.getpriority(os.PRIO_PROCESS, os.getpid()), frozenset(cores))

    def restore(self) -> str:
        try:
            if sys.platform == "linux":
                os.sched_setaffinity(os.getpid(), self.cores)
            os.setpriority(os.PRIO_PROCESS, os.getpid(), self.priority)
        except OSError as error:
            return f"which could not be restored: {error.strerror}"
        return "which are restored"
