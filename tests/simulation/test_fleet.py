"""Replicas simulated one after the other, and samples of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.fleet import simulate_fleet
from evenflow.simulation.forecast import forecast
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Observed, Targets
from tests.simulation.test_fast_forward import load, step_times


def setup_of(num_replicas: int, router: str = "round-robin") -> Setup:
    return Setup(
        step_times=step_times(2, has_pauses=True),
        policy=PolicySpec.parse("fixed:256"),
        num_blocks=400,
        num_replicas=num_replicas,
        router=router,
        targets=Targets(0.02, 0.5),
    )


def with_tenants(what: Load, count: int) -> Load:
    return replace(what, requests=[replace(one, tenant=f"t{n % count}") for n, one in enumerate(what.requests)])


@pytest.mark.parametrize("router", ["round-robin", "tenant"])
def test_one_after_the_other_is_no_different(router: str) -> None:
    what = with_tenants(load(40, rate=12.0), 1 if router == "round-robin" else 5)
    parts = simulate_fleet(what, setup_of(3, router), seed=2)
    together = Observed.together(parts)
    expected = Cluster(what, setup_of(3, router), 2).run()
    assert len(parts) == together.num_replicas == 3
    for name in ("ttft", "gaps", "latency"):
        assert getattr(together, name).cells == getattr(expected, name).cells
    for name in (
        "num_steps",
        "num_tokens",
        "num_done",
        "num_good",
        "num_late",
        "causes",
        "missed",
        "seconds",
        "kv_peak",
    ):
        assert getattr(together, name) == getattr(expected, name)


def test_a_router_that_looks_at_the_replicas_has_them_all() -> None:
    [whole] = simulate_fleet(load(20), setup_of(3, "least-loaded"), seed=0)
    assert (whole.num_replicas, whole.num_done) == (3, 20)


def test_a_sample_stands_for_all() -> None:
    what, setup = load(200, rate=75.0), setup_of(24)
    drawn, whole = (forecast(lambda seed: what, setup, num_runs=1, sample=one) for one in (8, None))
    assert drawn.sample is not None
    assert whole.sample is None
    assert (drawn.sample.num_simulated, drawn.sample.num_replicas) == (8, 24)
    assert drawn.num_done < whole.num_done == 200
    assert drawn.requests_per_s.value == pytest.approx(whole.requests_per_s.value, rel=0.5)  # of all replicas
    for percent in ("p50", "p90"):
        error = drawn.sample.errors["latency"][percent]
        value, real = (one.percentiles["latency"][percent].value for one in (drawn, whole))
        assert 0 < error < 1
        assert value == pytest.approx(real, rel=0.05 + 2 * error)
    assert drawn.as_json()["sample"].as_json()["num_simulated"] == 8


def test_a_router_that_looks_at_the_replicas_gets_groups_of_them() -> None:
    parts = simulate_fleet(load(60, rate=75.0), setup_of(48, "least-loaded"), 0, sample=32)
    assert [one.num_replicas for one in parts] == [8] * 4
    assert 20 < sum(one.num_done for one in parts) < 60


def test_more_of_the_replicas_leave_less_doubt() -> None:
    errors = []
    for sample in (4, 16, 24):
        found = forecast(lambda seed: load(100, rate=75.0), setup_of(24), num_runs=1, sample=sample).sample
        assert found is not None
        errors.append(found.errors["latency"]["p50"])
    assert errors[0] > errors[1] > errors[2] == 0.0


@pytest.mark.parametrize(("router", "sample"), [("round-robin", 3), ("round-robin", 49), ("least-loaded", 16)])
def test_a_sample_of_too_few_or_too_many(router: str, sample: int) -> None:
    with pytest.raises(InvalidInput, match=f"a sample of {sample} replicas"):
        simulate_fleet(load(5), setup_of(48, router), 0, sample)


def test_a_sample_of_few_replicas() -> None:
    with pytest.raises(InvalidInput, match="only 3 replicas: simulate them all"):
        simulate_fleet(load(5), setup_of(3), 0, 3)
