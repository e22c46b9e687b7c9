"""Step times fitted to a recording, and recorded loads beside simulated ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median

import pytest
from make_step_times import step_times_of, timed_steps
from random_loads import Client, Load, Turn
from recorded_device import RECORDINGS
from simulator_fidelity import compare, measured_gaps, requests_of
from step_recording import RecordedLoad, Step, read_recording

from evenflow.simulation.samples import percentile
from evenflow.simulation.step_times import find_step_times


@pytest.fixture(scope="module")
def cpu() -> object:
    return read_recording(RECORDINGS / "x86_smollm2.jsonl.gz")


def test_fitted_step_times_take_what_was_recorded(cpu: object, tmp_path: Path) -> None:
    loads = cpu.loads[1:5]  # type: ignore[attr-defined]
    times = step_times_of(cpu, loads, "cpu", "a test")  # type: ignore[arg-type]
    steps = [one for load in loads for one in timed_steps(cpu, load)]  # type: ignore[arg-type]
    device = times.device(0)
    assert median(device.seconds(work) / seconds for work, seconds in steps) == pytest.approx(1.0, abs=0.1)
    assert times.noise is not None
    assert sum(len(slowness.factors) for slowness in times.noise) == len(steps)
    assert len({tuple(costs) for costs in times.costs}) > 5
    times.write(tmp_path / "cpu.json.gz")
    again = find_step_times(str(tmp_path / "cpu.json.gz"))
    assert again is not None
    assert again.device(1).seconds(steps[0][0]) == pytest.approx(times.device(1).seconds(steps[0][0]), rel=0.01)


def recorded(load: Load) -> RecordedLoad:
    """Two streams that decode every 10 ms, and a pause of 50 ms."""
    ends = [0, 10_000, 20_000, 70_000, 80_000]
    steps = [Step(schedule_us=end, seen_us=end + 8_000, num_decodes=2, budget=64) for end in ends]
    return RecordedLoad({"seed": 1, "load": asdict(load), "reference_us": [0, 1]}, steps)


LOAD = Load(
    1, 0.5, "none", (Client(0.0, (Turn(10, 4), Turn(20, 6)), 0.01, repeats=True),), (Client(0.2, (Turn(30, 1),)),)
)


def test_gaps_are_those_between_steps() -> None:
    gaps = measured_gaps(recorded(LOAD))
    assert gaps.total() == 8
    assert percentile(gaps, 50) == pytest.approx(0.010, rel=0.01)
    assert percentile(gaps, 100) == pytest.approx(0.050, rel=0.01)


def test_clients_are_sessions_that_last_as_long_as_their_load() -> None:
    load = requests_of(recorded(LOAD))
    assert load.until == 0.5
    chat = sorted((one for one in load.requests if one.session == "0"), key=lambda one: int(one.id.partition(".")[2]))
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in chat[:3]] == [(10, 4), (20, 6), (10, 4)]
    assert sum(0.002 * one.num_output_tokens + one.delay_s for one in chat) >= 0.5
    assert {one.arrival_s for one in load.requests} == {0.0, 0.2, None}


def test_a_load_is_compared_at_each_percentile() -> None:
    device = find_step_times("x86-smollm2")
    assert device is not None
    found = list(compare(recorded(LOAD), device))
    assert [one.percent for one in found] == [50, 90, 99]
    assert all(one.measured > 0 and one.predicted.is_known for one in found)
