"""Exact statistics of millions of lengths in little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class LengthFigures:
    """Statistics of a set of lengths. A percentile is the smallest length that covers that share of them."""

    count: int
    total: int
    mean: float
    min: int
    p50: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """The number of lengths in [low, high)."""

    low: int
    high: int
    count: int


class Lengths:
    """Lengths counted by value: datasets hold far fewer distinct lengths than sequences."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._counts = Counter(values)

    def add(self, length: int) -> None:
        self._counts[length] += 1

    @property
    def count(self) -> int:
        return self._counts.total()

    def percentile(self, percent: float) -> int:
        rank = max(1, math.ceil(self.count * percent / 100))
        return next(value for value, num_up_to in self._cumulative_counts() if num_up_to >= rank)

    def cumulative(self) -> tuple[list[int], list[float]]:
        """Every distinct length, and the share of lengths up to it."""
        points = list(self._cumulative_counts())
        return [value for value, _ in points], [num_up_to / self.count for _, num_up_to in points]

    def _cumulative_counts(self) -> Iterator[tuple[int, int]]:
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
        """Powers of two from the shortest length to the longest, including empty ones in between."""
        by_power: Counter[int] = Counter()
        for value, count in self._counts.items():
            by_power[value.bit_length()] += count
        powers = range(min(by_power), max(by_power) + 1)
        return [Bucket(1 << power >> 1, 1 << power, by_power[power]) for power in powers]

    @classmethod
    def union(cls, parts: Iterable[Lengths]) -> Lengths:
        whole = cls()
        for part in parts:
            whole._counts.update(part._counts)
        return whole
