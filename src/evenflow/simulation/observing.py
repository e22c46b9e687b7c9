"""What the clients of a simulated run see, and why tokens were late."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
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
        target = self.targets.tbt
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
                if target is not None and gap > target:
                    stream.num_late += 1
                    self.causes[_cause(stream, outcome, step, target, usual_seconds)] += 1
            stream.last_at, stream.last_step, stream.was_preempted = now, step, False
        for gap, count in common.items():
            self.gaps.add(gap, now, count)
        for request in outcome.finished:
            self._end(request, now)

    def repeated(self, requests: Sequence[Request], repeats: Sequence[Repeat], step: int, usual_seconds: float) -> None:
        """Steps that gave each of these one token; `step` is the last one."""
        streams, times = [self._streams[request.id] for request in requests], [one.committed_at for one in repeats]
        for stream in streams:
            self._late(times[0] - stream.last_at, (stream,), repeats[0].seconds, usual_seconds)
            self.gaps.add(times[0] - stream.last_at, times[0])
        for (before, now), one in zip(pairwise(times), repeats[1:], strict=True):
            self.gaps.add(now - before, now, len(streams))
            self._late(now - before, streams, one.seconds, usual_seconds)
        for stream in streams:
            stream.num_tokens += len(times)
            stream.last_at, stream.last_step, stream.was_preempted = times[-1], step, False
        self.num_steps += len(times)
        self.num_tokens += len(times) * len(streams)
        self.seconds = max(self.seconds, times[-1])

    def _late(self, gap: float, streams: Iterable[_Stream], seconds: float, usual_seconds: float) -> None:
        """Of a step that only decodes, and that no stream was left out of."""
        if self.targets.tbt is not None and gap > self.targets.tbt:
            is_slow = usual_seconds <= self.targets.tbt and seconds > _SLOW * usual_seconds
            for stream in streams:
                stream.num_late += 1
                self.causes[Cause.SLOW_DEVICE if is_slow else Cause.STREAMS] += 1

    def _end(self, request: Request, now: float) -> None:
        stream = self._streams.pop(request.id)
        self.latency.add(now - stream.arrived_at, stream.arrived_at)
        self.seconds = max(self.seconds, now)
        self.num_done += 1
        self.num_late += stream.num_late
        waited = stream.first_at - stream.arrived_at
        is_good = self.targets.ttft is None or waited <= self.targets.ttft
        self.num_good += is_good and stream.num_late <= _MAX_LATE_SHARE * (stream.num_tokens - 1)


def _cause(stream: _Stream, outcome: Committed, step: int, target: float, usual_seconds: Callable[[], float]) -> Cause:
    if stream.was_preempted:
        return Cause.PREEMPTED
    if step - stream.last_step > 1:
        return Cause.LEFT_OUT
    usual = usual_seconds()
    if usual <= target and outcome.result.seconds > _SLOW * usual:
        return Cause.SLOW_DEVICE
    return Cause.PREFILL if outcome.plan.chunks else Cause.STREAMS
