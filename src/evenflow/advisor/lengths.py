"""How long inputs are: exact figures of millions of lengths in little memory.

Must not know: where lengths come from and what is decided by them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """A set of lengths in a few figures. A percentile is the smallest length that so many percent do not exceed."""

    count: int
    total: int
    mean: float
    min: int
    p50: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """How many lengths are in [low, high)."""

    low: int
    high: int
    count: int


class Lengths:
    """Lengths, counted by their value: datasets hold far fewer different lengths than sequences."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts = Counter(values)

    def add(self, length: int) -> None:
        self._counts[length] += 1

    @property
    def count(self) -> int:
        return self._counts.total()

    def percentile(self, percent: float) -> int:
        rank = max(1, math.ceil(self.count * percent / 100))
        return next(value for value, num_upto in self._num_upto() if num_upto >= rank)

    def cumulative(self) -> tuple[list[int], list[float]]:
        """Every length that occurs, and the share of all that do not exceed it."""
        points = list(self._num_upto())
        return [value for value, _ in points], [num_upto / points[-1][1] for _, num_upto in points]

    def _num_upto(self) -> Iterator[tuple[int, int]]:
        values = sorted(self._counts)
        return zip(values, accumulate(self._counts[value] for value in values), strict=True)

    def share_over(self, threshold: int) -> float:
        return sum(count for value, count in self._counts.items() if value > threshold) / self.count

    def figures(self) -> LengthFigures:
        total = sum(value * count for value, count in self._counts.items())
        return LengthFigures(
            count=self.count,
            total=total,
            mean=total / self.count,
            min=min(self._counts),
            p50=self.percentile(50),
            p95=self.percentile(95),
            max=max(self._counts),
        )

    def buckets(self) -> list[Bucket]:
        """Powers of two from the shortest length to the longest, empty ones between them too."""
        by_power: Counter[int] = Counter()
        for value, count in self._counts.items():
            by_power[value.bit_length()] += count
        powers = range(min(by_power), max(by_power) + 1)
        return [Bucket(1 << power >> 1, 1 << power, by_power[power]) for power in powers]

    @classmethod
    def union(cls, parts: Sequence[Lengths]) -> Lengths:
        whole = cls()
        for part in parts:
            whole._counts.update(part._counts)
        return whole
