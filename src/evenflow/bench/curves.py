"""A target against fixed budgets at equal p99: what it costs the long prompts, read off the fixed policies' curve.

Must not know: how figures are measured or shown.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from evenflow.bench.stall import StallFigures


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
    fixed = sorted((f for f in figures if f.policy.startswith("fixed:")), key=lambda f: f.tbt_p99_s)
    return [
        AgainstFixed(
            policy=target.policy,
            tbt_p99_s=target.tbt_p99_s,
            long_ttft_s=target.long_ttft_p50_s,
            fixed_long_ttft_s=_read_off(fixed, target.tbt_p99_s, lambda f: f.long_ttft_p50_s),
            prefill_tokens_per_s=target.prefill_tokens_per_s,
            fixed_prefill_tokens_per_s=_read_off(fixed, target.tbt_p99_s, lambda f: f.prefill_tokens_per_s),
        )
        for target in figures
        if target.target_s is not None and fixed and fixed[0].tbt_p99_s <= target.tbt_p99_s <= fixed[-1].tbt_p99_s
    ]


def _read_off(fixed: Sequence[StallFigures], p99: float, value: Callable[[StallFigures], float]) -> float:
    """A curve's value at a p99 gap: straight between its points over the gap's logarithm."""
    after = max(1, bisect_left([f.tbt_p99_s for f in fixed], p99)) if len(fixed) > 1 else 0
    if not after or fixed[after].tbt_p99_s == fixed[after - 1].tbt_p99_s:
        return value(fixed[after])
    low, high = fixed[after - 1], fixed[after]
    way = math.log(p99 / low.tbt_p99_s) / math.log(high.tbt_p99_s / low.tbt_p99_s)
    return value(low) + way * (value(high) - value(low))
