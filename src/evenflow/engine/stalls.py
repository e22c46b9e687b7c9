"""Why tokens came late: the gap before each, split into causes whose seconds add up to it.

What a chunk cost its step is what the step-time model says of the step with it and without. Steps in which no token is
late cost next to nothing here. Must not know: how steps are planned or run, how stalls are shown.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from typing import NamedTuple

from evenflow.core.plan import ExecutorCaps, StepPlan
from evenflow.core.scheduler import Committed, Late
from evenflow.core.step_time import StepTimeModel
from evenflow.engine.gc_timer import GcTimer

NUM_WORST = 32


class CauseKind(StrEnum):
    """What a stream waits for."""

    DECODES = "decodes"  # the step, had it only decoded
    PREFILL = "prefill"  # what a chunk added to that
    UNEXPLAINED = "unexplained"  # the step took longer than predicted
    HOST = "host"  # between steps: planning, commits, text, callers
    GARBAGE_COLLECTION = "garbage_collection"
    KV_MEMORY = "kv_memory"  # steps that the stream was not part of, for lack of blocks


class Cause(NamedTuple):
    kind: CauseKind
    seconds: float
    request_id: str | None = None  # whose chunk it was
    num_tokens: int = 0  # of that chunk


@dataclass(frozen=True, slots=True)
class Stall:
    """A step that made tokens late, as the stream felt it that waited longest."""

    step_id: int
    at: float  # the clock when the token came
    request_id: str
    num_late_streams: int
    gap_s: float
    late_s: float
    causes: tuple[Cause, ...]  # largest first; they add up to the gap


@dataclass(slots=True)
class StallLog:
    """The worst stalls, and what all of them together were caused by."""

    step_time: StepTimeModel
    caps: ExecutorCaps
    gc_timer: GcTimer
    num_late_tokens: int = 0
    num_stalls: int = 0  # steps with late tokens
    latest: Stall | None = None  # of the step observed last, where it made tokens late
    seconds_by_cause: defaultdict[CauseKind, float] = field(default_factory=lambda: defaultdict(float))
    _worst: list[tuple[float, int, Stall]] = field(default_factory=list)  # a heap, the least of them first
    _numbers: Iterator[int] = field(default_factory=count)
    _last_commit: float = 0.0
    _last_gc_seconds: float = 0.0

    def observe(self, committed: Committed, now: float) -> None:
        """Take in a step at the moment of its commit."""
        self.latest = None
        if committed.late:
            self.latest = self.explain(committed, max(committed.late, key=lambda late: late.gap), now)
            self._add(self.latest)
        self._last_commit, self._last_gc_seconds = now, self.gc_timer.seconds

    def worst(self) -> list[Stall]:
        """The longest gaps, longest first, one a step."""
        return [stall for *_, stall in sorted(self._worst, reverse=True)]

    def clear(self) -> None:
        """Start over, as if no token had been late."""
        self.num_late_tokens = self.num_stalls = 0
        self.seconds_by_cause.clear()
        self._worst.clear()

    def _add(self, stall: Stall) -> None:
        self.num_stalls += 1
        self.num_late_tokens += stall.num_late_streams
        for cause in stall.causes:
            self.seconds_by_cause[cause.kind] += cause.seconds
        heapq.heappush(self._worst, (stall.gap_s, next(self._numbers), stall))
        if len(self._worst) > NUM_WORST:
            heapq.heappop(self._worst)

    def explain(self, committed: Committed, late: Late, now: float) -> Stall:
        """What made the gap before a token of this step, which has not been observed yet."""
        gc_seconds = self.gc_timer.seconds - self._last_gc_seconds
        since_last_step = min(late.gap, now - self._last_commit)
        in_step = min(committed.result.seconds, since_last_step)
        explained = list(self._predicted_causes(committed, in_step))
        unexplained = in_step - sum(cause.seconds for cause in explained)
        host = since_last_step - in_step
        # Where it struck is not known; wherever it did, nothing else explains that time.
        gc_in_step = min(gc_seconds, unexplained)
        gc_outside = min(gc_seconds - gc_in_step, host)
        causes = [
            *explained,
            Cause(CauseKind.UNEXPLAINED, unexplained - gc_in_step),
            Cause(CauseKind.HOST, host - gc_outside),
            Cause(CauseKind.GARBAGE_COLLECTION, gc_in_step + gc_outside),
            Cause(CauseKind.KV_MEMORY, late.gap - since_last_step),
        ]
        return Stall(
            step_id=committed.plan.step_id,
            at=now,
            request_id=late.request.id,
            num_late_streams=len(committed.late),
            gap_s=late.gap,
            late_s=late.seconds,
            causes=tuple(sorted((c for c in causes if c.seconds > 0), key=lambda cause: -cause.seconds)),
        )

    def _predicted_causes(self, committed: Committed, seconds: float) -> Iterator[Cause]:
        """The decodes, and each chunk by what it adds to the step before it: as predicted, but no more than it took."""
        decodes, *chunks = self.predicted_parts(committed.plan)
        if not (predicted := decodes + sum(chunks)):
            return
        # The model has learned since the step was planned; what it says now only shares out what it said then.
        scale = min(committed.predicted_seconds, seconds) / predicted
        yield Cause(CauseKind.DECODES, scale * decodes)
        for chunk, added in zip(committed.plan.chunks, chunks, strict=True):
            yield Cause(CauseKind.PREFILL, scale * added, chunk.request_id, chunk.length)

    def predicted_parts(self, plan: StepPlan) -> list[float]:
        """Predicted seconds of the step had it only decoded, then what each of its chunks adds to those before it."""
        shapes = (plan.shape(self.caps, num_chunks) for num_chunks in range(len(plan.chunks) + 1))
        seconds = [self.step_time.predict(shape) for shape in shapes]
        return [seconds[0], *(max(after - before, 0.0) for before, after in pairwise(seconds))]
