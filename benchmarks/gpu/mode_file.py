"""The file that switches an engine's scheduler from one run's mode to the next, in whichever process it runs.

Modes are named in `switchable` and `switchable_sglang`. A target begins with what the plug-in has learned so far;
`new+target:50ms` with nothing, as a new server; `kept+target:50ms` with what was stored, as a second start.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evenflow.core.policies import PolicySpec
from evenflow.host import cache_folder
from evenflow.hosts.settings import Settings, read_settings

MODE_VARIABLE = "EVENFLOW_BENCH_MODE_FILE"
APPLIED = ".applied"  # suffix of the file that says which change was applied last


class ModeFile:
    """Read by a scheduler when it is idle: steps in flight belong to the mode that scheduled them."""

    def __init__(self) -> None:
        self._path = Path(os.environ[MODE_VARIABLE])
        self._read_at = 0

    def read_if_changed(self) -> str | None:
        written_at = self._path.stat().st_mtime_ns
        if written_at == self._read_at:
            return None
        self._read_at = written_at
        return self._path.read_text()

    def confirm(self) -> None:
        """The mode that was read is in force."""
        self._path.with_suffix(APPLIED).write_text(str(self._read_at))


def with_target(steering: Any, mode: str, additional_config: object, make: Callable[[Settings], Any]) -> Any:
    """The steering for a mode with a target: the one there is, or another that `make` makes."""
    start, _, policy = mode.rpartition("+")
    spec = PolicySpec.parse(policy)
    if not start:
        steering.core.set_policy(spec)
        return steering
    steering.core.close()  # which stores its step times
    if start == "new":
        shutil.rmtree(cache_folder() / "step-times", ignore_errors=True)
    settings = read_settings(additional_config)
    return make(Settings(spec, settings.step_socket, settings.target_file))
