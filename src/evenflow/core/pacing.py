"""When a stream's next token is due.

A stream that emitted token k at e[k] owes token k+1 at

    d[k+1] = clamp(d[k] + T, e[k] + T, e[k] + T + C)

with T the target and C the most slack that a stream may have earned by being early. Strict is C = 0: no gap over T.
Paced lends a stream's earlier haste to prefill: gaps may reach T + C, but no stream falls behind one token per T.
A late token re-anchors: the next is due T after it. Must not know: requests, steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NO_DEADLINE = -math.inf  # before the first token nothing is owed
PACED_SLACK = 2.0  # C in units of T


@dataclass(frozen=True, slots=True)
class Pacing:
    """The engine's target; a request may bring its own."""

    target: float  # T, seconds
    is_paced: bool = False

    def target_of(self, own_target: float | None) -> float:
        """The target of a stream that brought this one, or none."""
        return self.target if own_target is None else own_target

    def next_deadline(self, deadline: float, emitted: float, own_target: float | None) -> float:
        """When the token after the one emitted now is due, which was itself due at `deadline`."""
        target = self.target_of(own_target)
        slack = PACED_SLACK * target if self.is_paced else 0.0
        return min(max(deadline + target, emitted + target), emitted + target + slack)
