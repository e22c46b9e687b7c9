"""How much of the machine other programs use: to wait for a quiet moment, and to report it with a measurement.

Reads Linux's /proc; zero on other systems.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

WINDOW_S = 0.5
QUIET_SHARE = 0.1
PROC = Path("/proc")


class OtherLoad:
    """CPU time of all processes outside one session, since this was created."""

    def __init__(self, session_id: int | None = None) -> None:
        self._session_id = session_id
        self._started = time.perf_counter()
        self._others_before = self._others_seconds()

    def share(self) -> float:
        """The share of all cores that others have used, 0 to 1."""
        core_seconds = (time.perf_counter() - self._started) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, (self._others_seconds() - self._others_before) / core_seconds))

    def _others_seconds(self) -> float:
        if not (PROC / "stat").exists():
            return 0.0
        own = 0.0 if self._session_id is None else _session_seconds(self._session_id)
        return _busy_seconds() - own


def wait_until_quiet(patience_s: float) -> None:
    """Return as soon as the machine is quiet, or after `patience_s`."""
    deadline = time.perf_counter() + patience_s
    while time.perf_counter() < deadline:
        watch = OtherLoad()
        time.sleep(WINDOW_S)
        if watch.share() < QUIET_SHARE:
            return


def _busy_seconds() -> float:
    user, nice, system, _idle, _waiting, *interrupts = map(
        int, (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + sum(interrupts[:3])) / os.sysconf("SC_CLK_TCK")


def _session_seconds(session_id: int) -> float:
    ticks = 0
    for folder in PROC.glob("[0-9]*"):
        try:
            # The name before the parenthesis may hold spaces; after it come state, parent, group, session, ...
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[3]) == session_id:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
