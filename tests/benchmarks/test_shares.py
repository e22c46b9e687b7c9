"""The benchmarks of shares run, and what they show holds on loads that they were not tuned on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from classes import ODDS, Targets, goodput, half_load, load_of
from loads import drawn_sizes, trace, traced_sizes
from tenants import backlogged, flooded, jain
from virtual_engine import Arrival, Setup, simulate

from evenflow.core.service_classes import DEFAULT_CLASSES
from tests.shared_data import shared_path

SECONDS = 8.0
URGENT, *OTHERS = DEFAULT_CLASSES


def test_a_run_serves_what_it_is_given_by_every_rule() -> None:
    load = [Arrival(0.1 * n, 300 + n, 5, tenant=f"t{n % 2}", service_class="batch") for n in range(20)]
    for rule in ("shares", "fcfs", "priority"):
        outcome = simulate(load, Setup(rule=rule), 60.0)
        assert all(one.is_complete for one in outcome.served)
        assert outcome.num_tokens == sum(one.num_prompt_tokens + one.num_output_tokens for one in load)


def test_jains_index() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


@pytest.mark.slow
def test_tenants_with_prompts_of_all_lengths_get_their_shares() -> None:
    fair, _ = backlogged(9001, SECONDS, "target:25ms", "shares")
    first_come, _ = backlogged(9001, SECONDS, "target:25ms", "fcfs")
    assert fair >= 0.95
    assert fair > first_come


@pytest.mark.slow
def test_a_flood_hardly_delays_a_light_tenant() -> None:
    sizes = drawn_sizes((500, 4000), (16, 64)), drawn_sizes((2000, 32_000), (16, 64))
    found = flooded(9002, *sizes, tokens_per_s=3000, seconds=SECONDS, policy="target:25ms")
    assert found.ratio(found.shares, 0.99) < 2 < found.ratio(found.fcfs, 0.99)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["azure2023_conv.csv", "mooncake_conversation_4000.jsonl"])
def test_urgent_requests_of_a_trace_meet_their_targets_at_overload(name: str) -> None:
    requests = trace(shared_path(f"traces/{name}"))
    classes = (replace(URGENT, ttft_target=2.0), *OTHERS)
    seconds = 2 * SECONDS  # until a queue has built up, every rule meets the targets
    load = load_of(9003, requests, 4.0, seconds, ODDS)
    found = {
        rule: goodput(
            simulate(load, Setup(rule=rule, policy="fixed:1024", classes=classes), seconds),
            "interactive",
            Targets(2.0, 0.05),
            seconds,
        )
        for rule in ("shares", "fcfs")
    }
    assert found["shares"] >= 1.5 * found["fcfs"]


def test_batch_work_uses_what_urgent_work_leaves() -> None:
    shares, fcfs = half_load(9004, None, Setup(policy="fixed:1024"), SECONDS)
    assert shares.useful_s >= 0.95 * fcfs.useful_s


def test_sizes_are_those_of_the_trace() -> None:
    requests = trace(shared_path("traces/azure2023_code.csv"))
    draw = traced_sizes(requests)
    known = {(one.num_prompt_tokens, one.num_output_tokens) for one in requests}
    rng = random.Random(1)
    assert all(draw(rng) in known for _ in range(50))
