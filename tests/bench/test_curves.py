"""Reading what a fixed budget would give at a target's own p99."""

from __future__ import annotations

import math

import pytest

from evenflow.bench.curves import against_fixed
from evenflow.bench.stall import StallFigures


def figures(policy: str, p99: float, ttft: float, rate: float, target: float | None = None) -> StallFigures:
    return StallFigures(
        policy=policy,
        target_s=target,
        feasible=None,
        num_gaps=1,
        steps=1,
        tbt_p50_s=p99,
        tbt_p90_s=p99,
        tbt_p99_s=p99,
        tbt_max_s=p99,
        late_share=None,
        long_ttft_p50_s=ttft,
        long_ttft_max_s=ttft,
        prefill_tokens_per_s=rate,
        total_s=1.0,
        output_tokens_per_s=1.0,
        step_time_mape=0.0,
        divergence=None,
        worst=(),
    )


FIXED = [figures("fixed:512", 0.8, 5.0, 600.0), figures("fixed:64", 0.2, 9.0, 300.0), figures("unchunked", 4.0, 4.0, 1)]


def test_between_two_budgets_the_curve_is_straight_on_logarithmic_axes() -> None:
    ttft, rate = math.sqrt(9.0 * 5.0), math.sqrt(300.0 * 600.0)  # 0.4 s is as far from 0.2 as from 0.8
    (found,) = against_fixed([*FIXED, figures("target:400ms", 0.4, 1.1 * ttft, 0.9 * rate, target=0.4)])
    assert found.policy == "target:400ms"
    assert found.fixed_long_ttft_s == pytest.approx(ttft)
    assert found.ttft_ratio == pytest.approx(1.1)
    assert found.fixed_prefill_tokens_per_s == pytest.approx(rate)
    assert found.prefill_ratio == pytest.approx(0.9)


@pytest.mark.parametrize(("p99", "ttft"), [(0.2, 9.0), (0.8, 5.0)])
def test_at_a_budgets_own_p99_it_is_that_budget(p99: float, ttft: float) -> None:
    (found,) = against_fixed([*FIXED, figures("target:1ms", p99, 1.0, 1.0, target=0.001)])
    assert found.fixed_long_ttft_s == pytest.approx(ttft)


@pytest.mark.parametrize("p99", [0.19, 0.81])
def test_beyond_the_fixed_budgets_nothing_is_guessed(p99: float) -> None:
    assert against_fixed([*FIXED, figures("target:1ms", p99, 1.0, 1.0, target=0.001)]) == []


def test_one_budget_is_a_curve_of_one_point() -> None:
    one = [figures("fixed:64", 0.2, 9.0, 300.0), figures("target:200ms", 0.2, 9.0, 300.0, target=0.2)]
    assert against_fixed(one)[0].ttft_ratio == 1.0
    assert against_fixed(one[1:]) == []
