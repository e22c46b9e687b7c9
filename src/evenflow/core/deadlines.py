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
from typing import NamedTuple, Protocol

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

    def restart(self, pacing: Pacing | None) -> None:
        """Apply a new target from the last token on. Earned slack is lost."""
        if self.due > NO_DEADLINE:
            self.due = self.last_token_time + pacing.target_of(self.own_target) if pacing else NO_DEADLINE


class Stream(Protocol):
    """A request, as far as its deadline is concerned."""

    @property
    def id(self) -> str: ...
    @property
    def deadline(self) -> StreamDeadline: ...


def emit(streams: Iterable[Stream], pacing: Pacing, now: float) -> list[LateToken]:
    """Record a token of each stream, emitted now; returns those that are late. Flat: every token passes here."""
    late = []
    target, is_paced, strict = pacing.target, pacing.is_paced, now + pacing.target
    for stream in streams:
        deadline = stream.deadline
        due, own = deadline.due, deadline.own_target
        if NO_DEADLINE < due < now:
            late.append(LateToken(stream.id, now - deadline.last_token_time, now - due))
        if own is None and not is_paced:
            deadline.due = strict
        else:
            deadline.due = pacing.next_due(due, now, target if own is None else pacing.target_of(own))
        deadline.last_token_time = now
    return late


class Urgency(NamedTuple):
    """What the streams of a step require."""

    earliest_deadline: float | None  # None: no stream has one yet
    tightest_target: float | None  # None: no stream decodes


def urgency(streams: Iterable[Stream], pacing: Pacing) -> Urgency:
    earliest, tightest, target = math.inf, math.inf, pacing.target
    for stream in streams:
        deadline = stream.deadline
        if NO_DEADLINE < deadline.due < earliest:
            earliest = deadline.due
        own = target if deadline.own_target is None else pacing.target_of(deadline.own_target)
        if own < tightest:
            tightest = own
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
