"""Forecasts: percentiles with intervals, what is unknown, and why gaps are long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.core.service_classes import ServiceClass
from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.devices import StepWork
from evenflow.simulation.forecast import forecast
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.observing import Cause, Targets
from evenflow.simulation.step_times import Largest, Slowness
from tests.simulation.test_fast_forward import load, step_times

SETUP = Setup(
    step_times=step_times(1), policy=PolicySpec.parse("fixed:256"), num_blocks=2000, targets=Targets(0.02, 1.0)
)


def test_percentiles_have_intervals() -> None:
    found = forecast(lambda seed: load(30, seed), SETUP, num_runs=4)
    assert (found.num_runs, found.num_requests, found.num_done) == (4, 120, 120)
    for of_kind in found.percentiles.values():
        for one in of_kind.values():
            assert one.value is not None
            assert one.low is not None
            assert one.high is not None
            assert 0 < one.low <= one.value <= one.high
    gaps = found.percentiles["gap"]
    assert (gaps["p50"].value or 0) <= (gaps["p99"].value or 0)
    assert found.unknown is None
    assert found.as_json()["percentiles"]["gap"]["p50"] == gaps["p50"]


def test_a_stream_alone_is_what_its_steps_take() -> None:
    """One prompt of 100 tokens and 49 more tokens: steps of 4 ms and a little, and the host's 0.9 ms."""
    alone = Load("one", [LoadRequest("r", ((2, 100),), 50, 0.0)])
    found = forecast(lambda seed: alone, SETUP, num_runs=1)
    assert found.percentiles["gap"]["p50"].value == pytest.approx(0.004 + 2e-5 + 1.3e-6 + 0.0009, rel=0.005)
    assert found.percentiles["ttft"]["p50"].value == pytest.approx(0.004 + 100 * 2e-5 + 0.0009, rel=0.005)
    assert found.percentiles["latency"]["p50"].value == pytest.approx(0.0069 + 49 * 0.00493, rel=0.01)


def test_shapes_beyond_the_recorded_ones_are_unknown() -> None:
    times = replace(step_times(1), largest=Largest(rows=100_000, decodes=2, decode_context=10**6, position=10**6))
    crowd = Load("crowd", [replace(one, arrival_s=0.0) for one in load(10).requests])
    found = forecast(lambda seed: crowd, replace(SETUP, step_times=times), num_runs=1)
    assert "more than 2 streams" in (found.unknown or "")
    assert not any(one.is_known for of_kind in found.percentiles.values() for one in of_kind.values())
    assert not found.goodput.is_known
    assert found.num_done == 10


def late(setup: Setup, what: Load) -> dict[str, int]:
    return dict(Cluster(what, setup, 0).run().causes)


def test_causes_of_long_gaps() -> None:
    chat = LoadRequest("chat", ((2, 20),), 150, 0.0)
    long = LoadRequest("long", ((3, 3000),), 2, 0.2)
    both, strict = Load("both", [chat, long]), replace(SETUP, targets=Targets(0.008, 1.0))
    assert set(late(strict, both)) == {Cause.PREFILL}
    apart = replace(strict, policy=PolicySpec.parse("alternate:256"))
    assert Cause.LEFT_OUT in late(apart, both)
    assert set(late(replace(SETUP, targets=Targets(0.001, 1.0)), Load("chat", [chat]))) == {Cause.STREAMS}
    crowd = Load("crowd", [LoadRequest(f"r{n}", ((n + 2, 300),), 300, 0.01 * n) for n in range(8)])
    full = replace(strict, num_blocks=80)
    assert Cause.PREEMPTED in late(full, crowd)
    slow = Slowness([1.0, 0.1], [1.0, 5.0])

    def usual(work: StepWork) -> float:
        return 0.004

    times = replace(step_times(1), estimate=usual)
    device = times.device(0)
    pausing = replace(device, noise=slow.noise(random.Random(0)))
    paused = Cluster(Load("chat", [replace(chat, num_output_tokens=600)]), strict, 0)
    node = paused._nodes[0]
    node._device = pausing
    node.replica._device = pausing
    assert set(paused.run().causes) == {Cause.SLOW_DEVICE}


def test_goodput_counts_requests_whose_gaps_and_first_token_are_in_time() -> None:
    chat = LoadRequest("chat", ((2, 20),), 100, 0.0)
    found = forecast(lambda seed: Load("chat", [chat]), SETUP, num_runs=1)
    assert found.good_share.value == 1.0
    found = forecast(lambda seed: Load("chat", [chat]), replace(SETUP, targets=Targets(0.001, 1.0)), num_runs=1)
    assert found.good_share.value == 0.0
    found = forecast(lambda seed: Load("chat", [chat]), replace(SETUP, targets=Targets(None, 0.001)), num_runs=1)
    assert found.good_share.value == 0.0


def test_what_does_not_fit_is_refused_and_counted() -> None:
    what = Load("large", [LoadRequest("large", ((2, 5000),), 10, 0.0), LoadRequest("small", ((3, 20),), 10, 0.0)])
    found = forecast(lambda seed: what, replace(SETUP, num_blocks=50), num_runs=1)
    assert found.refused == {"it does not fit in the KV cache": 1}
    assert found.num_done == 1
    assert found.good_share.value == 0.5


def test_a_class_that_the_server_does_not_have_is_the_default() -> None:
    what = Load("log", [LoadRequest("r", ((2, 20),), 5, 0.0, service_class="gold")])
    assert forecast(lambda seed: what, SETUP, num_runs=1).num_done == 1
    classes = (ServiceClass(name="gold", rank=0, share=0.5), ServiceClass(name="rest", rank=1, share=0.5))
    assert forecast(lambda seed: what, replace(SETUP, classes=classes), num_runs=1).num_done == 1
