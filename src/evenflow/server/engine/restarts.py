"""How long to wait before an engine that died is started again.

Must not know: what an engine is.
"""

from __future__ import annotations

_FIRST_S = 0.5
_LONGEST_S = 30.0
_STABLE_S = 60.0  # an engine that ran so long and died is started again without further delay


class RestartDelay:
    """Doubles with every engine that does not run well."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def after(self, ran_s: float) -> float:
        """The seconds to wait, now that one has died after so many."""
        is_first = ran_s > _STABLE_S or not self._seconds
        self._seconds = _FIRST_S if is_first else min(2 * self._seconds, _LONGEST_S)
        return self._seconds
