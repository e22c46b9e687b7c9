"""Exact statistics of millions of lengths in little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
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


class Lengths(Counter[int]):
    """How often each length occurs: datasets hold far fewer distinct lengths than sequences."""

    def percentile(self, percent: float) -> int:
        rank = max(1, math.ceil(self.total() * percent / 100))
        return next(length for length, num_up_to in self._cumulative_counts() if num_up_to >= rank)

    def cumulative(self) -> tuple[list[int], list[float]]:
        """Every distinct length, and the share of lengths up to it."""
        points = list(self._cumulative_counts())
        return [length for length, _ in points], [num_up_to / self.total() for _, num_up_to in points]

    def _cumulative_counts(self) -> Iterator[tuple[int, int]]:
        lengths = sorted(self)
        return zip(lengths, accumulate(self[length] for length in lengths), strict=True)

    def share_over(self, threshold: int) -> float:
        return sum(count for length, count in self.items() if length > threshold) / self.total()

    def figures(self) -> LengthFigures:
        count, total = self.total(), sum(length * count for length, count in self.items())
        return LengthFigures(
            count=count,
            total=total,
            mean=total / count,
            min=min(self),
            p50=self.percentile(50),
            p95=self.percentile(95),
            max=max(self),
        )

    def buckets(self) -> list[Bucket]:
        """Powers of two from the shortest length to the longest, including empty ones in between."""
        by_power: Counter[int] = Counter()
        for length, count in self.items():
            by_power[length.bit_length()] += count
        powers = range(min(by_power), max(by_power) + 1)
        return [Bucket(1 << power >> 1, 1 << power, by_power[power]) for power in powers]
