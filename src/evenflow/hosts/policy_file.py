"""A latency target that changes while the host runs, through a file: every process of the host sees the same one."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidConfig

logger = logging.getLogger("evenflow.hosts")

NO_TARGET = "none"


class PolicyFile:
    """One line, such as `target:50ms,paced` or `none`. It is replaced atomically."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None  # the version read last
        self._problem = ""  # with it, as logged

    def write(self, policy: PolicySpec | None) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(NO_TARGET if policy is None or policy.target is None else str(policy), encoding="utf-8")
        new.replace(self._path)

    def read_if_changed(self, current: PolicySpec | None) -> PolicySpec | None:
        """The file's policy if it was written since the last call, else the current one. Takes microseconds."""
        try:
            status = os.stat(self._path)
            version = status.st_mtime_ns, status.st_ino
            if version == self._seen:
                return current
            self._seen = version
            text = self._path.read_text(encoding="utf-8").strip()
            policy = None if text == NO_TARGET else PolicySpec.parse(text)
        except FileNotFoundError:
            return current
        except (OSError, UnicodeError, InvalidConfig) as error:
            self._warn(f"the target in {self._path} is ignored: {error}")
            return current
        if policy is not None and policy.target is None:
            self._warn(f"the policy '{policy}' in {self._path} is ignored: it keeps no target")
            return current
        self._problem = ""
        return policy

    def _warn(self, problem: str) -> None:
        """Once: a file that cannot be looked at is looked at before each step."""
        if problem != self._problem:
            self._problem = problem
            logger.warning("evenflow: %s", problem)
