"""A latency target that is changed while vLLM runs, through a file: every engine process of vLLM's sees the same one.

Must not know: vLLM's classes, HTTP.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from evenflow.core.policies import has_target, make_policy
from evenflow.errors import InvalidConfig

logger = logging.getLogger("vllm.evenflow")


class TargetFile:
    """One line, such as `target:50ms,paced`. It is replaced as a whole, so that nobody reads half of it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._seen: tuple[int, int] | None = None  # which version of the file was read last

    def write(self, policy: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(policy, encoding="utf-8")
        new.replace(self._path)

    def changed(self) -> str | None:
        """The policy, where another was written since the last call. Before every step: a look costs microseconds."""
        try:
            status = os.stat(self._path)
            version = status.st_mtime_ns, status.st_ino
            if version == self._seen:
                return None
            self._seen = version
            policy = self._path.read_text(encoding="utf-8").strip()
            make_policy(policy, 1)
        except FileNotFoundError:
            return None
        except (OSError, UnicodeError, InvalidConfig) as error:
            logger.warning("evenflow: the target in %s is not taken: %s", self._path, error)
            return None
        if not has_target(policy):
            logger.warning("evenflow: the policy %r in %s is not taken: it keeps no target", policy, self._path)
            return None
        return policy
