"""Sums up samples. Must not know: what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """How a set of samples is spread; all zero where there are none."""

    count: int
    p50: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if not samples:
            return cls(0, 0.0, 0.0, 0.0)
        ordered = sorted(samples)
        return cls(len(ordered), percentile(ordered, 50), percentile(ordered, 99), ordered[-1])


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The smallest sample that so many percent of them do not exceed: always one that was seen."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
