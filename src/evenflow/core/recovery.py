"""After a fault: which requests are computed again, and in which steps, so that a faulty one harms no others.

When a whole step fails, any of its requests may be the cause. Each is computed again in steps of its own, so the one
that fails again fails alone. Knows requests and candidates, but no blocks and no slots.
"""

from __future__ import annotations

import sys

from evenflow.core.policy import FLOOR_TOKENS, Candidate
from evenflow.core.request import Request

# Tokens after which a suspect is innocent: one of its chunk and one of a decode.
_PROOFS = 2


class Recovery:
    """The suspects of failed steps, and the bound on a step's tokens since memory ran out."""

    def __init__(self) -> None:
        self.suspects: dict[str, int] = {}  # requests that run in steps of their own, with the tokens still to give
        self.max_step_tokens = sys.maxsize
        self._ran_alone = False

    def is_retried(self, request: Request, is_shared: bool) -> bool:
        """Is a request computed again after this fault? `is_shared`: another one may be the cause."""
        if request.has_failed or request.id in self.suspects:
            return False
        if is_shared:
            self.suspects[request.id] = _PROOFS
        else:
            request.has_failed = True
        return True

    def gave_token(self, request_id: str) -> None:
        if (left := self.suspects.pop(request_id, 0)) > 1:
            self.suspects[request_id] = left - 1

    def discard(self, request_id: str) -> None:
        self.suspects.pop(request_id, None)

    def turn(self, decodes: list[Request], candidates: list[Candidate]) -> tuple[list[Request], list[Candidate]]:
        """Who may take part in the next step: one suspect alone, or the others, in turn."""
        suspects = self.suspects
        others = [one for one in decodes if one.id not in suspects]
        other_candidates = [one for one in candidates if one.request_id not in suspects]
        decode = next((one for one in decodes if one.id in suspects), None)
        candidate = next((one for one in candidates if one.request_id in suspects), None)
        has_turn = not self._ran_alone or not (others or other_candidates)
        self._ran_alone = has_turn and (decode is not None or candidate is not None)
        if not self._ran_alone:
            return others, other_candidates
        return ([decode], []) if decode is not None else ([], [candidate] if candidate is not None else [])

    def shrink(self, num_rows: int) -> bool:
        """Memory ran out in a step of this many rows: bound later ones to half. False: the bound is at its minimum."""
        least = max(FLOOR_TOKENS, num_rows // 2)
        if least >= self.max_step_tokens:
            return False
        self.max_step_tokens = least
        return True
