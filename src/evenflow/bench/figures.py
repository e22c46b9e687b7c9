"""Percentiles of samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
