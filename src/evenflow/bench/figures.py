"""Percentiles of samples, and figures of two sides: their ratio, its confidence interval, and answers that differ.

Knows neither what was measured nor how: a round is its measurements and its seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

RESAMPLES = 1000
CONFIDENCE = 0.95
ESTIMATE_COLUMNS = ("A", "B", "B / A", f"{CONFIDENCE:.0%} interval", "differ")
_SHOWN_CHARACTERS = 40

T = TypeVar("T")
MeasuredRound = tuple[Sequence[T], float]  # one measurement per request, and the round's seconds


@dataclass(frozen=True, slots=True)
class Spread:
    """All zero if there are no samples."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        ordered = sorted(samples)
        return cls(len(ordered), *(percentile(ordered, percent) for percent in (50, 99, 100)))


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest sample that at least this share of all samples does not exceed; 0 if there are none."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else 0.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure of both sides, and the confidence interval of its ratio b/a; None if a side is zero too often."""

    name: str
    a: float
    b: float
    interval: tuple[float, float] | None

    @property
    def ratio(self) -> float | None:
        return self.b / self.a if self.a else None

    @property
    def differs(self) -> bool:
        """The interval excludes 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"ratio": self.ratio, "differs": self.differs}

    def cells(self) -> list[str]:
        """A row of a table: the name, and the ESTIMATE_COLUMNS."""
        ratio = "-" if self.ratio is None else f"{self.ratio:.3f}"
        interval = "-" if self.interval is None else "{:.3f} to {:.3f}".format(*self.interval)
        return [self.name, f"{self.a:.4g}", f"{self.b:.4g}", ratio, interval, "yes" if self.differs else "no"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Two answers to one request that differ: from which character on, and how each continues."""

    where: Mapping[str, int | str]  # the request, by what its comparison calls it
    character: int
    a: str
    b: str

    @classmethod
    def of(cls, a: str, b: str, **where: int | str) -> Difference:
        same = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        shown = slice(same, same + _SHOWN_CHARACTERS)
        return cls(where, same, a[shown], b[shown])

    def as_json(self) -> dict[str, int | str]:
        return {**self.where, "character": self.character, "a": self.a, "b": self.b}


def estimate_ratios(
    pairs: Sequence[tuple[MeasuredRound[T], MeasuredRound[T]]],
    figures: Callable[[Sequence[MeasuredRound[T]]], Mapping[str, float]],
    generator: random.Random,
) -> list[Estimate]:
    """`figures` gives those of one side's rounds; 0 stands for nothing to measure.

    Intervals come from resampled pairs, and resampled requests within each.
    """
    seen_a, seen_b = (figures(side) for side in zip(*pairs, strict=True))
    ratios: dict[str, list[float]] = {name: [] for name in seen_a}
    for _ in range(RESAMPLES):
        resampled = [_resample(pair, generator) for pair in generator.choices(pairs, k=len(pairs))]
        a, b = (figures(side) for side in zip(*resampled, strict=True))
        for name, values in ratios.items():
            if a[name] and b[name]:
                values.append(b[name] / a[name])
    return [Estimate(name, seen_a[name], seen_b[name], _interval(values)) for name, values in ratios.items()]


def _interval(values: list[float]) -> tuple[float, float] | None:
    if len(values) < RESAMPLES / 2:
        return None
    values.sort()
    tail = 50 * (1 - CONFIDENCE)
    return percentile(values, tail), percentile(values, 100 - tail)


def _resample(
    pair: tuple[MeasuredRound[T], MeasuredRound[T]], generator: random.Random
) -> tuple[MeasuredRound[T], MeasuredRound[T]]:
    """Requests drawn with replacement, the same on both sides, so that what they share cancels out in the ratio."""
    (a, a_seconds), (b, b_seconds) = pair
    places = generator.choices(range(len(a)), k=len(a))
    return ([a[place] for place in places], a_seconds), ([b[place] for place in places], b_seconds)
