"""The stall benchmark of vLLM, without vLLM: the names of its figures, and how a target is judged."""

from __future__ import annotations

from stall_curve import table, to_json

from evenflow.bench.stall_run import ClientFigures

KEYS = [
    "name",
    "target_s",
    "gap_p50_s",
    "gap_p90_s",
    "gap_p99_s",
    "gap_max_s",
    "long_ttft_p50_s",
    "num_gaps",
    "total_s",
]


def point(policy: str, p99: float, ttft: float, target_s: float | None = None) -> ClientFigures:
    return ClientFigures(
        policy=policy,
        target_s=target_s,
        num_gaps=10,
        tbt_p50_s=p99 / 2,
        tbt_p90_s=p99,
        tbt_p99_s=p99,
        tbt_max_s=p99,
        long_ttft_p50_s=ttft,
        long_ttft_max_s=ttft,
        prefill_tokens_per_s=1.0,
        total_s=1.0,
        output_tokens_per_s=1.0,
    )


def test_figures_keep_their_names_in_json() -> None:
    found = to_json(point("target:50ms", 0.04, 2.0, 0.05))
    assert found.keys() >= set(KEYS)
    assert (found["name"], found["gap_p99_s"], found["target_s"]) == ("target:50ms", 0.04, 0.05)
    assert "policy" not in found


def test_a_target_is_held_against_the_curve_of_fixed_budgets() -> None:
    points = [point("fixed:64", 0.2, 9.0), point("fixed:512", 0.8, 4.0), point("default", 1.6, 3.0)]
    lines = table([*points, point("target:400ms", 0.4, 3.0, 0.4), point("target:50ms", 0.1, 9.0, 0.05)]).splitlines()
    assert lines[4].split()[-2:] == ["1.00", "0.500"]  # on logarithmic axes 6 s lie between 9 and 4
    assert lines[5].split()[-2:] == ["2.00", "outside"]
