"""Deadlines, lateness and patience: when a stream's next token is due, and how long others may overtake a prompt.

A stream that emitted token k at e[k] owes token k+1 at

    d[k+1] = clamp(d[k] + T, e[k] + T, e[k] + T + C)

T is the target, C the most slack that a stream can earn by being early. Strict is C = 0: no gap exceeds T. Paced lends
earned slack to prefill: gaps may reach T + C, but no stream falls behind one token per T. A late token re-anchors: the
next one is due T after it. evenflow's scheduler and the steering of host engines both use this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

NO_DEADLINE = -math.inf  # nothing is owed before the first token
PACED_SLACK = 2.0  # C in units of T
# However long the rest of a prefill is predicted to take, it lets others pass for no longer than this. What has been
# served is no prediction, and adds to it: else nobody would pass the second half of a prefill that takes a minute.
MAX_PATIENCE_S = 30.0
# Later prompts get at most this share of the prefill while an earlier one waits or is served.
OVERTAKING_SHARE = 0.3
# The last seconds of a prefill that was begun are not interrupted: those who arrive in them hardly notice the wait.
LAST_PART_S = 0.2
# The earliest prompts, whose ranks follow at each step. The others' follow when they are among these.
HEAD_OF_LINE = 16


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
        """Record a token emitted now; returns it if it is late."""
        due, target = self.due, pacing.target_of(self.own_target)
        late = LateToken(request_id, now - self.last_token_time, now - due) if NO_DEADLINE < due < now else None
        self.due, self.last_token_time = pacing.next_due(due, now, target), now
        return late

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
        target = pacing.target_of(stream.own_target)
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
    overtaken_s: float = 0.0  # seconds of steps that later prompts got before it
    served_s: float = 0.0  # seconds of steps that it got itself, with the decodes beside it
    passed_tokens: int = 0  # most tokens of requests that were admitted before it while it did not fit


def rank_time(place: Place, start: int, patience: float, seconds_of: Callable[[int, int], float]) -> float:
    """A prompt's place in line: its arrival, plus a patience in proportion to its own prefill.

    Short prompts overtake long ones, but only if they arrive within the long one's patience, so none starves. Prefill
    that is done counts like prefill that is left: otherwise the last part of a long prompt would hold up all later
    ones. `seconds_of` predicts prefill by start and length; `start` is the prompt's next position. As predictions
    improve, the rank follows.
    """
    return _rank_time(place, seconds_of(start, place.num_tokens - start), patience, seconds_of)


def _rank_time(place: Place, left: float, patience: float, seconds_of: Callable[[int, int], float]) -> float:
    served = seconds_of(place.num_cached_tokens, place.num_tokens - place.num_cached_tokens) - left
    beside_decodes = max(0.0, place.served_s - served)
    seconds = min(patience * left, MAX_PATIENCE_S) + max(1.0, patience) * max(0.0, served) + beside_decodes
    return place.arrival_time + min(seconds, place.ttft_target or math.inf)


def rank_times(
    head: Sequence[tuple[Place, int]], now: float, patience: float, seconds_of: Callable[[int, int], float]
) -> list[float]:
    """The same for the earliest prompts of a line, in order of arrival, each with its next position.

    Later prompts overtake one for a share of the time until its first token, but not in its last part. They start only
    when all that they have left fits into the share: if prompts took turns, all would be late.
    """
    ranks: list[float] = []
    next_rank, next_left = math.inf, 0.0  # of the later prompts, the one that is served next
    for place, start in reversed(head):
        left = seconds_of(start, place.num_tokens - start)
        rank = _rank_time(place, left, patience, seconds_of)
        overtaking = next_left if next_rank < rank else 0.0
        ttft = now - place.arrival_time + min(left, MAX_PATIENCE_S) + overtaking
        is_last_part = start > place.num_cached_tokens and left <= LAST_PART_S
        if is_last_part or place.overtaken_s + overtaking > OVERTAKING_SHARE * ttft:
            rank = place.arrival_time
        if rank <= next_rank:
            next_rank, next_left = rank, left
        ranks.append(rank)
    return ranks[::-1]


def charge_overtaking(head: Sequence[tuple[Place, int]], step_tokens: int, step_seconds: float) -> None:
    """Charge a step to the earliest prompts in line, given with their tokens in it: each waits for the later arrivals
    that the step serves too."""
    later_tokens = step_tokens
    for place, tokens in head:  # in order of arrival
        later_tokens -= tokens
        place.served_s += step_seconds * tokens / step_tokens
        place.overtaken_s += step_seconds * later_tokens / step_tokens
