"""Deadlines and lateness: when a stream's next token is due, and when a prompt's first one is.

A stream that emitted token k at e[k] owes token k+1 at

    d[k+1] = clamp(d[k] + T, e[k] + T, e[k] + T + C)

T is the target, C the most slack that a stream can earn by being early. Strict is C = 0: no gap exceeds T. Paced lends
earned slack to prefill: gaps may reach T + C, but no stream falls behind one token per T. A late token re-anchors: the
next one is due T after it. evenflow's scheduler and the steering of host engines both use this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

NO_DEADLINE = -math.inf  # nothing is owed before the first token
PACED_SLACK = 2.0  # C in units of T


@dataclass(frozen=True, slots=True)
class Pacing:
    """The engine's target. A request may have its own."""

    target: float  # T, seconds
    is_paced: bool = False
    feasible: float = 0.0  # the lowest target that is feasible beside prefill

    def target_of(self, own: float | None) -> float:
        """A stream's target. One that cannot be kept is the engine's: it would only hold up the prompts of others."""
        return self.target if own is None or own < min(self.feasible, self.target) else own

    def next_due(self, due: float, emitted: float, target: float) -> float:
        """When the next token is due, if one that was due at `due` is emitted now."""
        strict = emitted + target
        if not self.is_paced:
            return strict
        return min(max(due + target, strict), strict + PACED_SLACK * target)


class LateToken(NamedTuple):
    request_id: str
    gap: float  # seconds since the stream's previous token
    seconds: float  # after its deadline


class StreamDeadline:
    """When one stream's next token is due."""

    __slots__ = ("due", "last_token_time", "own_target")

    def __init__(self, own_target: float | None = None) -> None:
        self.own_target = own_target  # None: the engine's
        self.due = NO_DEADLINE
        self.last_token_time = NO_DEADLINE

    def emit(self, request_id: str, pacing: Pacing, now: float) -> LateToken | None:
        """Record a token emitted now; returns it if it is late. Every token of a stream passes here."""
        due, last = self.due, self.last_token_time
        target = pacing.target if self.own_target is None else pacing.target_of(self.own_target)
        self.due = pacing.next_due(due, now, target) if pacing.is_paced else now + target
        self.last_token_time = now
        return LateToken(request_id, now - last, now - due) if NO_DEADLINE < due < now else None

    def restart(self, pacing: Pacing | None) -> None:
        """Apply a new target from the last token on. Earned slack is lost."""
        if self.due > NO_DEADLINE:
            self.due = self.last_token_time + pacing.target_of(self.own_target) if pacing else NO_DEADLINE


class Urgency(NamedTuple):
    """What the streams of a step require."""

    earliest_deadline: float | None  # None: no stream has one yet
    tightest_target: float | None  # None: no stream decodes


def urgency(streams: Iterable[StreamDeadline], pacing: Pacing) -> Urgency:
    earliest, tightest = math.inf, math.inf
    for stream in streams:
        if NO_DEADLINE < stream.due < earliest:
            earliest = stream.due
        target = pacing.target if stream.own_target is None else pacing.target_of(stream.own_target)
        if target < tightest:
            tightest = target
    return Urgency(earliest if earliest < math.inf else None, tightest if tightest < math.inf else None)


@dataclass(slots=True)
class Place:
    """What a prompt's place in line depends on."""

    arrival_time: float
    num_tokens: int
    num_cached_tokens: int
    ttft_target: float | None = None
    passed_tokens: int = 0  # most tokens of requests that were admitted before it while it did not fit

    def due(self, seconds: float) -> float:
        """When its first token is due, at the latest these seconds after its arrival. The earliest due goes first."""
        return self.arrival_time + min(seconds, self.ttft_target or math.inf)
