"""Runs mutants in forked processes with limits. One that dies, hangs or takes too much memory is a finding, and lost
alone: another process goes on behind it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evenflow.host import limit_memory
from tests.fuzz.mutants import Mutants
from tests.fuzz.trying import FINDING, Trial

_MORE_BYTES = 1 << 30  # address space beyond that of a warm process
_MORE_RESIDENT_KB = 300 << 10  # the files are smaller than a megabyte
_CPU_SECONDS = 10
_WALL_SECONDS = 120
_MUTANTS_PER_PROCESS = 200
_WRITTEN_BYTES = 64 << 20
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FORBIDDEN = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "socket.connect",
    "pickle.find_class",
)
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.chmod", "os.symlink", "os.link", "os.truncate", "shutil.rmtree")
_FUZZER_FAILED = 70
_IN_OPEN, _IN_NONBLOCK = 0x20, os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class Result:
    number: int
    file: str
    outcome: str
    reason: str


def run_mutants(seed: int, numbers: range, shares: dict[str, int], num_workers: int) -> Iterator[Result]:
    """The results in the order in which they come."""
    scratch = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="evenflow-fuzz-", dir=scratch) as root:
        workers = [
            _Worker(seed, numbers[place::num_workers], shares, Path(root) / str(place)) for place in range(num_workers)
        ]
        try:
            while any(worker.pid for worker in workers):
                for worker in _ready(workers):
                    yield from worker.read()
        finally:
            for worker in workers:
                worker.end()


def _ready(workers: list[_Worker]) -> list[_Worker]:
    running = [worker for worker in workers if worker.pid]
    readable, _, _ = select.select([worker.pipe for worker in running], [], [], 1.0)
    return [worker for worker in running if worker.pipe in readable or worker.is_late]


class _Worker:
    """A process for its share of the mutants, and its successors."""

    def __init__(self, seed: int, numbers: range, shares: dict[str, int], root: Path) -> None:
        self._mutants = Mutants(seed, str(root / "outside"), shares)
        self._numbers, self._root, self._generation = numbers, root, 0
        self.pid = 0
        self._start()

    def _start(self) -> None:
        """Fork a process for the numbers that are left."""
        self._next, self._rest, self._heard = 0, b"", time.monotonic()
        if not self._numbers:
            self.pid = 0
            return
        self._generation += 1
        root = self._root.with_name(f"{self._root.name}-{self._generation}")
        self._mutants.set_outside(str(root / "outside"))
        self.pipe, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.pipe)
            _work(self._mutants, self._numbers[:_MUTANTS_PER_PROCESS], root, writer)
        os.close(writer)

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self._heard > _WALL_SECONDS

    def read(self) -> Iterator[Result]:
        """What the process reported, or how it ended."""
        content = b"" if self.is_late else os.read(self.pipe, 1 << 16)
        self._heard = time.monotonic()
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            result = Result(*json.loads(line))
            self._next = self._numbers.index(result.number) + 1
            yield result
        if content:
            return
        status = self._reap()
        if os.WIFEXITED(status) and os.WEXITSTATUS(status) == _FUZZER_FAILED:
            raise RuntimeError("the fuzzer itself failed, see above")
        num_asked = min(len(self._numbers), _MUTANTS_PER_PROCESS)
        if self._next < num_asked:
            number = self._numbers[self._next]
            self._next += 1
            yield Result(number, self._mutants.make(number).file, FINDING, f"the process died: {_describe(status)}")
        self._numbers = self._numbers[self._next :]
        self._start()

    def _reap(self) -> int:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1]

    def end(self) -> None:
        if self.pid:
            self._reap()


def _describe(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"exit code {os.waitstatus_to_exitcode(status)}"
    number = os.WTERMSIG(status)
    meaning = {signal.SIGXCPU: f" ({_CPU_SECONDS} s of processor time)", signal.SIGKILL: f" ({_WALL_SECONDS} s)"}
    return signal.Signals(number).name + meaning.get(signal.Signals(number), "")


def _work(mutants: Mutants, numbers: range, root: Path, writer: int) -> None:
    """The forked process: never returns."""
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # panics of libraries are reported as findings
        trial = Trial(root)
        escapes = _Escapes(root)
        limit_memory(_MORE_BYTES)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_WRITTEN_BYTES, _WRITTEN_BYTES))
        for number in numbers:
            usage = resource.getrusage(resource.RUSAGE_SELF)
            end = int(usage.ru_utime + usage.ru_stime) + _CPU_SECONDS
            resource.setrlimit(resource.RLIMIT_CPU, (end, resource.RLIM_INFINITY))
            mutant = mutants.make(number)
            outcome, reason = trial.run(mutant, mutants.random(number, "trial"))
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - usage.ru_maxrss
            if grown > _MORE_RESIDENT_KB:
                outcome, reason = FINDING, f"memory grew by more than {_MORE_RESIDENT_KB >> 10} MiB ({outcome})"
            if escaped := escapes.found():
                outcome, reason = FINDING, escaped
            os.write(writer, json.dumps([number, mutant.file, outcome, reason[:300]]).encode() + b"\n")
        os._exit(0)
    except BaseException as error:
        os.write(1, f"the fuzzer failed: {error!r}\n".encode())
        os._exit(_FUZZER_FAILED)


class _Escapes:
    """Sees what leaves a trial's folder: files opened in `outside`, files written elsewhere, processes, sockets."""

    def __init__(self, root: Path) -> None:
        self._root, self._found = str(root), ""
        libc = ctypes.CDLL(None, use_errno=True)
        self._watch = libc.inotify_init1(_IN_NONBLOCK)
        # The kernel reports files that libraries open; Python's hook below sees only Python's own.
        for path in (root / "outside", *(root / "outside").iterdir()):
            libc.inotify_add_watch(self._watch, str(path).encode(), _IN_OPEN)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if event in _FORBIDDEN:
            self._found = f"{event} was called"
        elif event in _CHANGING and not self._is_inside(arguments[0]):
            self._found = f"{event} outside of the folder"
        elif event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITING and not self._is_inside(path):
                self._found = "a file was opened for writing outside of the folder"

    def _is_inside(self, path: object) -> bool:
        return isinstance(path, int) or os.path.realpath(os.fsdecode(path)).startswith(self._root)  # type: ignore[arg-type]

    def found(self) -> str:
        """What happened since the last call; empty if nothing did."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._watch, 1 << 16):
                self._found = "a file outside of the model's folder was opened"
        found, self._found = self._found, ""
        return found
