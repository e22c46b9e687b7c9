"""What the clients of a simulated run see, and why tokens were late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from evenflow.core.outcome import Committed, Repeat
from evenflow.core.plan import StepPlan
from evenflow.core.request import Request
from evenflow.simulation.load import LoadRequest
from evenflow.simulation.samples import Samples

# The device was slow if a step took this many times what it should.
_SLOW = 1.5
# A request's gaps are good if no more of them than this are over the target.
_MAX_LATE_SHARE = 0.01


class Cause(StrEnum):
    """Why a gap was over the target."""

    PREEMPTED = "preempted: the KV cache was full"
    LEFT_OUT = "waited for steps with prompts only"
    SLOW_DEVICE = "the device was slower than it usually is"
    PREFILL = "prefill in the same step"
    STREAMS = "too many streams, without any prefill"


class Targets(NamedTuple):
    """What users want, in seconds; None: anything will do."""

    tbt: float | None = None
    ttft: float | None = None


NO_TARGETS = Targets()


class Moment(NamedTuple):
    """The state of a replica."""

    at: float
    replica: int
    num_running: int
    num_waiting: int
    kv_share: float


# Figures of parts of a run that add up.
_COUNTS = (
    *("num_replicas", "num_steps", "num_tokens", "num_done", "num_good", "num_late", "num_preemptions"),
    *("prompt_tokens", "cached_tokens", "causes", "missed", "refused", "beyond", "moments"),
)


@dataclass(slots=True)
class _Stream:
    arrived_at: float
    first_at: float = 0.0
    last_at: float = 0.0
    last_step: int = -1
    num_tokens: int = 0
    num_late: int = 0
    was_preempted: bool = False


@dataclass(slots=True)
class Observed:
    """One run."""

    targets: Targets
    cell_s: float
    num_replicas: int = 1
    ttft: Samples = field(init=False)
    gaps: Samples = field(init=False)
    latency: Samples = field(init=False)  # from a request's arrival to its last token
    seconds: float = 0.0  # until the last token
    num_steps: int = 0
    num_tokens: int = 0
    num_done: int = 0
    num_good: int = 0
    num_late: int = 0  # gaps over the target
    causes: Counter[Cause] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)  # requests, by what was over its target
    refused: Counter[str] = field(default_factory=Counter)
    beyond: Counter[str] = field(default_factory=Counter)  # tokens of steps with shapes that were never recorded
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0
    kv_peak: float = 0.0
    moments: list[Moment] = field(default_factory=list)
    _streams: dict[str, _Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ttft, self.gaps, self.latency = (Samples(self.cell_s) for _ in range(3))

    @classmethod
    def together(cls, parts: Sequence[Observed]) -> Observed:
        """Of parts of one run, at the same time."""
        if len(parts) == 1:
            return parts[0]
        total = cls(parts[0].targets, parts[0].cell_s, num_replicas=0)
        for part in parts:
            for name in ("ttft", "gaps", "latency"):
                getattr(total, name).update(getattr(part, name))
            for name in _COUNTS:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            total.seconds, total.kv_peak = max(total.seconds, part.seconds), max(total.kv_peak, part.kv_peak)
        return total

    def arrived(self, request: LoadRequest, now: float) -> None:
        self._streams[request.id] = _Stream(now)

    def refuse(self, request: LoadRequest, reason: str) -> None:
        del self._streams[request.id]
        self.refused[reason] += 1

    def admitted(self, plan: StepPlan) -> None:
        for one in plan.admissions:
            if one.epoch:
                self.num_preemptions += 1
                self._streams[one.request_id].was_preempted = True
            else:
                self.prompt_tokens += one.num_prompt_tokens
                self.cached_tokens += one.num_cached_tokens

    def committed(self, outcome: Committed, now: float, step: int, usual_seconds: Callable[[], float]) -> None:
        """`step` counts the replica's own; `usual_seconds` are what this one should take."""
        self.num_steps += 1
        has_prefill = bool(outcome.plan.chunks)
        common: Counter[float] = Counter()  # most streams of a step have the same gap
        for request, _, tokens in outcome.emissions:
            if not tokens:
                continue
            stream = self._streams[request.id]
            self.num_tokens += 1
            stream.num_tokens += 1
            if stream.num_tokens == 1:
                stream.first_at = now
                self.ttft.add(now - stream.arrived_at, stream.arrived_at)
            else:
                gap = now - stream.last_at
                common[gap] += 1
                self._judge(stream, gap, step, outcome.result.seconds, usual_seconds, has_prefill=has_prefill)
            stream.last_at, stream.last_step, stream.was_preempted = now, step, False
        for gap, count in common.items():
            self.gaps.add(gap, now, count)
        for request in outcome.finished:
            self._end(request, now)

    def repeated(
        self, requests: Sequence[Request], repeats: Sequence[Repeat], step: int, usual_seconds: Callable[[int], float]
    ) -> None:
        """Steps that gave each of these one token, from this one of the replica's on. `usual_seconds`: as above."""
        streams = [self._streams[request.id] for request in requests]
        now = repeats[0].committed_at
        for stream in streams:
            gap = now - stream.last_at
            self.gaps.add(gap, now)
            self._judge(stream, gap, step, repeats[0].seconds, partial(usual_seconds, 0), has_prefill=False)
            stream.was_preempted = False
        for number, one in enumerate(repeats[1:], 1):
            gap, now = one.committed_at - now, one.committed_at
            self.gaps.add(gap, now, len(streams))
            if self.targets.tbt is not None and gap > self.targets.tbt:
                for stream in streams:
                    stream.last_step = step + number - 1
                    usual = partial(usual_seconds, number)
                    self._judge(stream, gap, step + number, one.seconds, usual, has_prefill=False)
        for stream in streams:
            stream.num_tokens += len(repeats)
            stream.last_at, stream.last_step = now, step + len(repeats) - 1
        self.num_steps += len(repeats)
        self.num_tokens += len(repeats) * len(streams)
        self.seconds = max(self.seconds, now)

    def _judge(
        self,
        stream: _Stream,
        gap: float,
        step: int,
        seconds: float,
        usual_seconds: Callable[[], float],
        *,
        has_prefill: bool,
    ) -> None:
        """Is the gap that this step ended over the target, and why?"""
        target = self.targets.tbt
        if target is None or gap <= target:
            return
        stream.num_late += 1
        if stream.was_preempted:
            cause = Cause.PREEMPTED
        elif step - stream.last_step > 1:
            cause = Cause.LEFT_OUT
        elif (usual := usual_seconds()) <= target and seconds > _SLOW * usual:
            cause = Cause.SLOW_DEVICE
        else:
            cause = Cause.PREFILL if has_prefill else Cause.STREAMS
        self.causes[cause] += 1

    def _end(self, request: Request, now: float) -> None:
        stream = self._streams.pop(request.id)
        self.latency.add(now - stream.arrived_at, stream.arrived_at)
        self.seconds = max(self.seconds, now)
        self.num_done += 1
        self.num_late += stream.num_late
        waited = stream.first_at - stream.arrived_at
        is_late = self.targets.ttft is not None and waited > self.targets.ttft
        has_long_gaps = stream.num_late > _MAX_LATE_SHARE * (stream.num_tokens - 1)
        self.missed["first tokens"] += is_late
        self.missed["gaps"] += has_long_gaps
        self.num_good += not is_late and not has_long_gaps
