"""Devices in virtual time: how long steps take, and when. They know nothing about requests and policies."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from evenflow.core.plan import ExecutorCaps, Shed, StepShape
from evenflow.executors.fake import VirtualClock
from evenflow.executors.shedding import Shedder


class StepWork(NamedTuple):
    """What a step computes."""

    num_decodes: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...]  # starts and lengths
    prefill_logit_rows: int = 0
    most_seconds: float | None = None  # as in `StepPlan`

    @property
    def num_rows(self) -> int:
        return self.num_decodes + (sum([length for _, length in self.chunks]) if self.chunks else 0)

    def shape(self, caps: ExecutorCaps) -> StepShape:
        return caps.step_shape(
            num_decodes=self.num_decodes,
            decode_context=self.decode_context,
            chunks=self.chunks,
            prefill_logit_rows=self.prefill_logit_rows,
        )


class Ran(NamedTuple):
    """How a device ran a step."""

    seconds: float
    shed: Mapping[int, Shed] = {}  # as in `StepResult`


class Device(Protocol):
    def launch_seconds(self, work: StepWork, at: float) -> float:
        """Host time to launch a step from this time on. The device runs meanwhile."""

    def run(self, work: StepWork, at: float) -> Ran:
        """Run a step from this time on."""


@dataclass(frozen=True, slots=True)
class BlockNoise:
    """Slowness in blocks of time, so that a disturbance hits neighbouring steps. The blocks repeat."""

    block_seconds: Sequence[float]
    slowness: Sequence[float]  # of each block: how many times as long a step takes
    start: float = 0.0  # the moment within the blocks at virtual time 0
    _ends: list[float] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", list(accumulate(self.block_seconds)))

    @property
    def period(self) -> float:
        return self._ends[-1]

    def at(self, at: float) -> float:
        """The slowness at a moment."""
        return self.slowness[bisect_right(self._ends, (self.start + at) % self.period)]

    def __call__(self, seconds: float, at: float) -> float:
        moment, taken = (self.start + at) % self.period, 0.0
        block = bisect_right(self._ends, moment)
        while seconds > (done := (self._ends[block] - moment) / self.slowness[block]):
            seconds -= done
            taken += self._ends[block] - moment
            moment, block = self._ends[block], block + 1
            if block == len(self._ends):
                moment, block = 0.0, 0
        return taken + seconds * self.slowness[block]


@dataclass(frozen=True, slots=True)
class ModelDevice:
    """Steps take modelled seconds, with noise. One with a time limit runs layer by layer and sheds rows, as a CPU's."""

    seconds: Callable[[StepWork], float]
    noise: Callable[[float, float], float] = lambda seconds, at: seconds  # of a step's seconds from a time on
    num_layers: int = 1
    launches: Callable[[StepWork, float], float] = lambda work, at: 0.0  # host seconds of a launch from a time on
    prefill_noise: Callable[[float, float], float] | None = None  # of steps with prefill; None: as others have

    def launch_seconds(self, work: StepWork, at: float) -> float:
        return self.launches(work, at)

    def run(self, work: StepWork, at: float) -> Ran:
        noise = self.prefill_noise if work.chunks and self.prefill_noise is not None else self.noise
        if work.most_seconds is None:
            return Ran(noise(self.seconds(work), at))
        clock, share = VirtualClock(at), 1 / self.num_layers
        lengths = [length for _, length in work.chunks]
        shedder = Shedder(work.num_decodes, lengths, self.num_layers, at + work.most_seconds, clock)
        for layer in range(1, self.num_layers + 1):
            chunks = tuple((start, length) for (start, _), length in zip(work.chunks, shedder.lengths, strict=True))
            clock.now += noise(share * self.seconds(work._replace(chunks=chunks)), clock.now)
            if layer < self.num_layers:
                shedder.after_layer(layer)
        return Ran(clock.now - at, shedder.shed())
