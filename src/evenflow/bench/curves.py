"""A target against fixed budgets at equal p99: what it costs the long prompts, read off the fixed policies' curve.

Must not know: how figures are measured or shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evenflow.bench.stall import StallFigures
from evenflow.core.policies import PolicySpec


@dataclass(frozen=True, slots=True)
class AgainstFixed:
    """A policy with a target, and what a fixed budget of the same p99 gap would give."""

    policy: str
    tbt_p99_s: float
    long_ttft_s: float
    fixed_long_ttft_s: float
    prefill_tokens_per_s: float
    fixed_prefill_tokens_per_s: float

    @property
    def ttft_ratio(self) -> float:
        """Under 1: the long prompts' first tokens come sooner than with a fixed budget."""
        return self.long_ttft_s / self.fixed_long_ttft_s

    @property
    def prefill_ratio(self) -> float:
        """Over 1: prefill is faster than with a fixed budget."""
        return self.prefill_tokens_per_s / self.fixed_prefill_tokens_per_s


def against_fixed(figures: Sequence[StallFigures]) -> list[AgainstFixed]:
    """Each target whose p99 lies between those of two fixed budgets, beside the curve drawn through these."""
    fixed = [f for f in figures if PolicySpec.parse(f.policy).name == "fixed"]
    found = []
    for target in figures:
        ttft = read_off(((f.tbt_p99_s, f.long_ttft_p50_s) for f in fixed), target.tbt_p99_s)
        rate = read_off(((f.tbt_p99_s, f.prefill_tokens_per_s) for f in fixed), target.tbt_p99_s)
        if target.target_s is not None and ttft is not None and rate is not None:
            found.append(
                AgainstFixed(
                    policy=target.policy,
                    tbt_p99_s=target.tbt_p99_s,
                    long_ttft_s=target.long_ttft_p50_s,
                    fixed_long_ttft_s=ttft,
                    prefill_tokens_per_s=target.prefill_tokens_per_s,
                    fixed_prefill_tokens_per_s=rate,
                )
            )
    return found


def read_off(points: Iterable[tuple[float, float]], p99: float) -> float | None:
    """A curve's value at a p99 gap, straight between its points (gap, value) on logarithmic axes; None beyond them."""
    ordered = sorted(points)
    if ordered and p99 == ordered[0][0]:
        return ordered[0][1]
    for (low, first), (high, second) in pairwise(ordered):
        if low < p99 <= high:
            way = math.log(p99 / low) / math.log(high / low)
            return first * math.exp(way * math.log(second / first))
    return None
