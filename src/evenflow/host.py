"""The machine this process runs on: its memory, where the user's cache lies, processes beside this one."""

from __future__ import annotations

import os
import re
import resource
import signal
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_MEMORY = Path("/proc/self/statm")


def total_memory() -> int:
    """Bytes of memory, whether in use or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory() -> int:
    """Bytes that can be had without swapping: what the system would give up from its file cache counts as free.

    Where the system does not say (it is not Linux), half of all memory.
    """
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        match = None
    return int(match[1]) * 1024 if match else total_memory() // 2


def limit_memory(more_bytes: int) -> None:
    """Let this process take this much more than it has, and leave no core file behind when it is killed.

    Where the system does not say how much it has (it is not Linux), there is no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        pages = int(_OWN_MEMORY.read_text().split()[0])
        limit = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def cache_folder() -> Path:
    """Where fetched models lie: $EVENFLOW_CACHE, else evenflow in the user's cache folder."""
    if chosen := os.environ.get("EVENFLOW_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "evenflow"


def start_without_interrupts(process: SpawnProcess) -> None:
    """Start a process that never sees an interrupt: a terminal sends it to all, and the first one decides."""
    resource_tracker.ensure_running()  # starting the process would do so, and unblock interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # it inherits what is blocked
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
