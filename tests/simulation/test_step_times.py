"""Devices of the simulator: what the package ships, files of users, and estimates."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from evenflow.core.roofline import ModelWork
from evenflow.errors import InvalidInput
from evenflow.simulation.devices import StepWork
from evenflow.simulation.step_times import Largest, StepTimes, estimated, find_step_times, shipped

LLAMA_8B = ModelWork(
    num_layers=32, row_flops=15e9, weight_bytes=15e9, position_flops=4 * 32 * 4096, cache_bytes=131_072
)
DECODES = StepWork(64, 64 * 1100, ())
MIXED = StepWork(64, 64 * 1100, ((8000, 448),))


def found(name: str) -> StepTimes:
    times = find_step_times(name)
    assert times is not None
    return times


@pytest.mark.parametrize("name", shipped())
def test_what_is_shipped_can_be_read_and_written(name: str, tmp_path: Path) -> None:
    times = found(name)
    times.write(tmp_path / "copy.json.gz")
    copy = found(str(tmp_path / "copy.json.gz"))
    assert copy.as_json() == times.as_json()
    assert times.device(3).seconds(MIXED) == copy.device(3).seconds(MIXED)
    assert times.largest is not None
    assert times.largest.beyond(MIXED) is None or "smollm2" in name
    assert times.noise is not None
    for slowness in times.noise:
        assert len(slowness.seconds) == len(slowness.factors) > 500


def test_an_h200_takes_what_was_measured_beside_it() -> None:
    """64 streams of 1,100 tokens: 6.5 to 8 ms with bf16 weights; a chunk of 448 rows beside them some 20 to 30."""
    device = found("h200-llama-8b-vllm").device(0)
    assert 0.006 < device.seconds(DECODES) < 0.010
    assert 0.015 < device.seconds(MIXED) < 0.035
    assert device.seconds(MIXED) > device.seconds(DECODES)


def test_a_run_has_its_own_costs_and_moment() -> None:
    times = found("h200-llama-8b-vllm")
    runs = [times.device(seed) for seed in range(8)]
    assert len({device.seconds(MIXED) for device in runs}) > 3
    assert len({device.run(MIXED, 0.0).seconds for device in runs}) == 8
    assert times.device(1).run(MIXED, 2.5) == times.device(1).run(MIXED, 2.5)


def test_launches_are_the_hosts() -> None:
    times = found("h200-llama-8b-vllm")
    decodes, mixed, launched = (
        times.device(0).launch_seconds(work, 0.0) for work in (DECODES, MIXED, StepWork(0, 0, ((0, 4000),)))
    )
    assert 0 < decodes < mixed < launched


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (StepWork(100, 1000, ()), None),
        (StepWork(125, 1000, ()), None),
        (StepWork(126, 1000, ()), "100 streams"),
        (StepWork(10, 9000, ()), "5,000 tokens together"),
        (StepWork(0, 0, ((0, 3000),)), "2,000 rows"),
        (StepWork(0, 0, ((20_000, 100),)), "10,000 tokens"),
    ],
)
def test_shapes_beyond_the_recorded_ones(work: StepWork, what: str | None) -> None:
    beyond = Largest(rows=2000, decodes=100, decode_context=5000, position=10_000).beyond(work)
    assert beyond is None if what is None else what in (beyond or "")


def test_a_roofline_is_near_the_recorded_device_and_says_that_it_is_none() -> None:
    estimate = estimated("NVIDIA H200", LLAMA_8B, (32, 8), "Llama-3.1-8B")
    assert estimate.is_estimate
    assert "ESTIMATE" in estimate.about
    recorded = found("h200-llama-8b-vllm")
    for work in (DECODES, MIXED, StepWork(8, 8000, ())):
        ratios = sorted(estimate.device(seed).seconds(work) / recorded.device(0).seconds(work) for seed in range(100))
        assert ratios[2] < 1 < ratios[-3]


def test_an_unknown_gpu_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"'TPU v5'.*unknown.*x86-smollm2.*H100"):
        estimated("TPU v5", LLAMA_8B, (32, 8), "Llama")
    assert find_step_times("TPU v5") is None


@pytest.mark.parametrize("damage", ["not gzip", "not JSON", "another version", "too few costs", "no caps"])
def test_a_broken_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json.gz"
    content = found("x86-smollm2").as_json()
    if damage == "another version":
        content["version"] = 99
    elif damage == "too few costs":
        content["costs"] = [[1.0]]
    elif damage == "no caps":
        del content["caps"]
    text = "{" if damage == "not JSON" else json.dumps(content)
    path.write_bytes(b"plain" if damage == "not gzip" else gzip.compress(text.encode()))
    with pytest.raises(InvalidInput, match=r"device\.json\.gz.*no file of step times"):
        find_step_times(str(path))


def test_noise_of_steps_with_prefill_is_their_own() -> None:
    times = found("x86-smollm2")
    assert times.noise is not None
    calm = replace(times.noise[0], factors=[1.0] * len(times.noise[0].factors))
    device = replace(times, noise=(calm, times.noise[1])).device(0)
    assert device.run(DECODES, 1.0).seconds == pytest.approx(device.seconds(DECODES))
    assert device.run(MIXED, 1.0).seconds != pytest.approx(device.seconds(MIXED), rel=1e-6)
