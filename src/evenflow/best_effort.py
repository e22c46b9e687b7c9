"""Work that serving can do without: warm-ups, estimates, reports, saving, advice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class BestEffort:
    """Runs optional work. An error costs only its result, and one log line however often it recurs."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._failed: set[str] = set()

    def run(self, name: str, work: Callable[[], T], otherwise: T) -> T:
        """The work's result, or `otherwise` after an error. `name`: the lost feature, for the log."""
        try:
            return work()
        except Exception as error:
            if name not in self._failed:
                self._failed.add(name)
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                self._logger.warning("evenflow: %s failed, serving goes on without it: %s", name, what)
            return otherwise
