"""The machine of this process: memory and cores, the user's cache, helper processes.

In a container, memory and cores are the limits of its cgroups (version 1 or 2).
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import re
import resource
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

EXIT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHIELDED_SIGNALS = (*EXIT_SIGNALS, signal.SIGHUP)
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_OWN_MEMORY = Path("/proc/self/statm")
# Of glibc's malloc.h, by number, and what they are set to.
_MALLOC_OPTIONS = {-1: 4 << 20, -3: 1 << 20, -8: 2}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
_CPU_TIMES = Path("/proc/stat")
_shielded: WeakSet[SpawnProcess] = WeakSet()


def total_memory() -> int:
    """Bytes of memory, in use or not."""
    limits = [limit for limit, _ in _memory_limits()]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


def available_memory() -> int:
    """Bytes available without swapping; reclaimable file cache counts as free.

    Half of all memory on systems other than Linux, which do not report it.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        match = None
    on_machine = int(match[1]) * 1024 if match else total_memory() // 2
    return min([on_machine, *(max(0, limit - used) for limit, used in _memory_limits())])


def num_cpus() -> int:
    """Cores for this process. More threads than a container's share of CPU time would be paused."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_cpu_limits()])))


class CpuTimes(NamedTuple):
    """Seconds until now, of the cores that this process may use."""

    at: float
    busy: float  # of all programs
    stolen: float  # by other machines on the same host
    own: float  # with those of children that have ended

    @classmethod
    def now(cls) -> CpuTimes | None:
        """None on systems other than Linux, which do not report them."""
        try:
            cores, lines = os.sched_getaffinity(0), _CPU_TIMES.read_text().splitlines()
            names = {f"cpu{number}" for number in cores}
            ticks = [[*map(int, words[1:9])] for words in map(str.split, lines) if words and words[0] in names]
        except (OSError, ValueError, AttributeError):
            return None
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy, stolen = sum(sum(one[:3]) + sum(one[5:7]) for one in ticks), sum(one[7] for one in ticks)
        second = os.sysconf("SC_CLK_TCK")
        children = os.times()  # such as the compiler of the kernels
        own = time.process_time() + children.children_user + children.children_system
        return cls(time.perf_counter(), busy / second, stolen / second, own)

    def taken_since(self, before: CpuTimes) -> float:
        """The cores that other programs and machines took since then."""
        taken = (self.busy - before.busy) + (self.stolen - before.stolen) - (self.own - before.own)
        return max(0.0, taken) / max(self.at - before.at, 1e-9)


def _memory_limits() -> Iterator[tuple[int, int]]:
    """The limit of each cgroup of this process, and its bytes in use without reclaimable file cache."""
    for folder in _cgroup_folders("memory"):
        for limit_name, used_name, cached_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _read_words(folder / limit_name), _read_words(folder / used_name)
            if limit and limit[0].isdigit() and used:
                statistics = _read_words(folder / "memory.stat")
                cached = dict(zip(statistics[::2], statistics[1::2], strict=False)).get(cached_name, "0")
                yield int(limit[0]), int(used[0]) - int(cached)


def _cpu_limits() -> Iterator[float]:
    """The cores allowed by each cgroup of this process."""
    for folder in _cgroup_folders("cpu"):
        newer = _read_words(folder / "cpu.max")
        older = _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
        for words in (newer, older):
            if len(words) == 2 and words[0].isdigit():
                yield int(words[0]) / int(words[1])


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups and their parents. A container sees its own as the root."""
    for line in _read_words(_OWN_CGROUPS):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controllers if controllers else _CGROUPS
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def limit_memory(more_bytes: int) -> None:
    """Limit this process's memory to its current use plus this, without a core file if it is killed.

    No limit on systems other than Linux, which do not report the current use.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        pages = int(_OWN_MEMORY.read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def return_freed_memory() -> None:
    """Give freed memory back to the system: what there is now, and large buffers as soon as they are freed.

    glibc keeps it, in a heap for each thread: after a burst of large bodies, 100 MB for good. Other libraries do not.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        for option, value in _MALLOC_OPTIONS.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def cache_folder() -> Path:
    """The folder of fetched models: $EVENFLOW_CACHE, else evenflow in the user's cache folder."""
    if chosen := os.environ.get("EVENFLOW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "evenflow"


def private_folder(path: Path) -> None:
    """Create a folder for its owner alone; `check_private` if it exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)


def check_private(path: Path) -> None:
    """PermissionError if a folder, or a link to one, belongs to a user other than root, or is writable for all.

    Other users' files there could be taken for our own. Its mode is not changed: it may be shared on purpose, as /tmp.
    """
    problem = None
    mode = stat.S_IMODE(path.stat().st_mode)
    if strangers := {path.lstat().st_uid, path.stat().st_uid} - {os.geteuid(), 0}:
        problem = f"it belongs to another user ({min(strangers)}, and this one is {os.geteuid()}); name a new folder"
    elif mode & stat.S_IWOTH:
        problem = (
            f"all users may write to it: its mode is {mode:o}; empty it and run chmod o-w on it, or name a new folder"
        )
    if problem is not None:
        raise PermissionError(errno.EPERM, problem, str(path))


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def start_shielded(process: SpawnProcess) -> None:
    """Start a process that no exit signal and no hangup reaches: terminals and supervisors send them to all processes,
    but this one decides.

    The new process has to end by itself after this one.
    """
    resource_tracker.ensure_running()  # otherwise the start would do it, and unblock these signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SHIELDED_SIGNALS)
    try:
        process.start()  # it inherits the blocked signals
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _shielded.add(process)


@atexit.register
def _kill_shielded() -> None:
    """Kill shielded processes at exit: multiprocessing would send SIGTERM, which they ignore, and wait."""
    for process in _shielded:
        with suppress(ValueError):  # closed: already ended
            process.kill()
