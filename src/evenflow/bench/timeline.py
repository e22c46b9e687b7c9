"""When each stream of a run was prefilled and got its tokens, and a picture of that in lines of text.

Pure: steps in, lines out. Knows neither a terminal nor a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from evenflow.core.report import StepReport

_MIN_CELL_S = 0.01
_TICK_CELLS = 10  # from one figure of the time axis to the next


class Marks(NamedTuple):
    """What a cell of the picture shows. A cell of a decoding stream without a token is blank: that is the gap."""

    waiting: str
    prefill: str
    token: str


UNICODE_MARKS = Marks("·", "▒", "●")
ASCII_MARKS = Marks(".", "#", "o")


@dataclass(slots=True)
class StreamTimes:
    """One stream. Times are seconds since the run began."""

    name: str
    arrived: float | None = None  # None: it has not arrived yet
    prefills: list[tuple[float, float]] = field(default_factory=list)  # steps with a chunk of its prompt
    tokens: list[float] = field(default_factory=list)
    is_finished: bool = False

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return [later - earlier for earlier, later in pairwise(self.tokens)]

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s, default=0.0)


@dataclass(slots=True)
class Timeline:
    """The streams of one run, filled step by step."""

    title: str
    began: float  # by the clock of the steps
    streams: dict[str, StreamTimes]  # by request id

    def take(self, report: StepReport) -> None:
        at = report.at - self.began
        for chunk in report.chunks:
            self.streams[chunk.request_id].prefills.append((at - report.seconds, at))
        for row, (request_id, tokens) in enumerate(zip(report.ids, report.tokens, strict=True)):
            stream = self.streams[request_id]
            stream.tokens += [at] * len(tokens)
            stream.is_finished = row in report.ended

    @property
    def is_finished(self) -> bool:
        return all(stream.is_finished for stream in self.streams.values())

    @property
    def longest_gap_s(self) -> float:
        return max(stream.longest_gap_s for stream in self.streams.values())

    @property
    def gaps_s(self) -> list[float]:
        """Those of all streams."""
        return [gap for stream in self.streams.values() for gap in stream.gaps_s]

    @property
    def last_token_s(self) -> float:
        return max((stream.tokens[-1] for stream in self.streams.values() if stream.tokens), default=0.0)

    def seconds(self, now: float) -> float:
        """How long the run has taken until now, by the clock, or took."""
        return self.last_token_s if self.is_finished else now - self.began


def draw(timelines: Sequence[Timeline], now: float, width: int, marks: Marks = UNICODE_MARKS) -> list[str]:
    """The runs one below the other, a row for each stream, on one scale of time that fits the width."""
    names = max((len(stream.name) for timeline in timelines for stream in timeline.streams.values()), default=0)
    num_cells = max(_TICK_CELLS, width - names - 1)
    longest = max((timeline.seconds(now) for timeline in timelines), default=0.0)
    cell_s = _cell_seconds(longest, num_cells)
    lines = []
    for timeline in timelines:
        seconds = timeline.seconds(now)
        lines.append(f"{timeline.title}: longest gap {timeline.longest_gap_s:.2f} s, {seconds:.1f} s in all")
        lines += [
            f"{stream.name:{names}} {_row(stream, seconds, cell_s, num_cells, marks)}".rstrip()
            for stream in timeline.streams.values()
        ]
    return [*lines, " " * (names + 1) + _axis(cell_s, num_cells)]


def _cell_seconds(longest: float, num_cells: int) -> float:
    """The smallest of 1, 2, 5, 10, ... hundredths of a second with which the longest run fits."""
    power = max(_MIN_CELL_S, 10.0 ** math.floor(math.log10(max(longest / num_cells, _MIN_CELL_S))))
    return next(step * power for step in (1, 2, 5, 10) if step * power * num_cells > longest)


def _row(stream: StreamTimes, now: float, cell_s: float, num_cells: int, marks: Marks) -> str:
    if stream.arrived is None:
        return ""
    cells = [" "] * num_cells

    def fill(start: float, end: float, mark: str) -> None:
        for cell in range(int(start / cell_s), min(num_cells, int(end / cell_s) + 1)):
            cells[cell] = mark

    fill(stream.arrived, stream.tokens[0] if stream.tokens else now, marks.waiting)
    for start, end in stream.prefills:
        fill(start, end, marks.prefill)
    for at in stream.tokens:
        fill(at, at, marks.token)
    return "".join(cells)


def _axis(cell_s: float, num_cells: int) -> str:
    ticks = [f"{round(cell * cell_s, 3):g} s" for cell in range(0, num_cells - _TICK_CELLS + 1, _TICK_CELLS)]
    return "".join(f"{tick:{_TICK_CELLS}}" for tick in ticks).rstrip()
