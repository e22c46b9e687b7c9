"""Compares a target with fixed budgets at the same p99 gap, by interpolating the budgets' TTFT and prefill rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evenflow.bench.stall_run import ClientFigures
from evenflow.core.policies import PolicySpec


@dataclass(frozen=True, slots=True)
class AgainstFixed:
    """A policy with a target, and what a fixed budget with the same p99 gap would give."""

    policy: str
    tbt_p99_s: float
    long_ttft_s: float
    fixed_long_ttft_s: float
    prefill_tokens_per_s: float
    fixed_prefill_tokens_per_s: float
    ttft_ratio: float  # under 1: long prompts get their first tokens sooner than with a fixed budget
    prefill_ratio: float  # over 1: prefill is faster than with a fixed budget


def against_fixed(figures: Sequence[ClientFigures]) -> list[AgainstFixed]:
    """Each target whose p99 gap lies within the curve of the fixed budgets."""
    fixed = [f for f in figures if PolicySpec.parse(f.policy).name == "fixed"]
    found = []
    for target in figures:
        p99, own_ttft, own_rate = target.tbt_p99_s, target.long_ttft_p50_s, target.prefill_tokens_per_s
        ttft = read_off(((f.tbt_p99_s, f.long_ttft_p50_s) for f in fixed), p99)
        rate = read_off(((f.tbt_p99_s, f.prefill_tokens_per_s) for f in fixed), p99)
        if target.target_s is not None and ttft is not None and rate is not None:
            ratios = own_ttft / ttft, own_rate / rate
            found.append(AgainstFixed(target.policy, p99, own_ttft, ttft, own_rate, rate, *ratios))
    return found


def read_off(points: Iterable[tuple[float, float]], p99: float) -> float | None:
    """A curve's value at a p99 gap, straight between its points (gap, value) on logarithmic axes; None outside them."""
    ordered = sorted(points)
    if ordered and p99 == ordered[0][0]:
        return ordered[0][1]
    for (low, first), (high, second) in pairwise(ordered):
        if low < p99 <= high:
            way = math.log(p99 / low) / math.log(high / low)
            return first * math.exp(way * math.log(second / first))
    return None
