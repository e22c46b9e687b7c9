"""evenflow's engine in virtual time on recorded steps of a CPU, and how such a recording is made."""

from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from cpu_agents import Agents
from cpu_random_loads import cpu_load, main, run_in_virtual_time
from record_cpu_steps import RecordedRun, recorded_steps
from recorded_device import RECORDINGS, work_of_step
from recorded_engine import RecordedCpu, recorded_run
from replay_agents import beside_misses
from step_recording import decode_steps, encode_steps, read_recording

from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Limits
from evenflow.engine.recorder import Recorder
from evenflow.executors.fake import FakeExecutor
from evenflow.simulation.devices import StepWork

RECORDING = "x86_smollm2"
TARGET = PolicySpec.for_target(0.4)


@pytest.fixture(scope="module")
def cpu() -> RecordedCpu:
    return RecordedCpu(RECORDING)


def test_a_recorded_step_takes_at_its_moment_what_it_took(cpu: RecordedCpu) -> None:
    loads = read_recording(RECORDINGS / f"{RECORDING}.jsonl.gz").loads
    steps = [step for load in loads for step in load.steps]
    seconds = [(step.gpu_end_us - step.gpu_begin_us) / 1e6 for step in steps]
    begins = [0.0, *accumulate(seconds)]
    assert cpu.noise.period == pytest.approx(begins[-1])
    device = cpu.device(0.0)
    for number in (1, 500, 2000, len(steps) - 1):
        taken = device.run(work_of_step(steps[number]), begins[number]).seconds
        assert taken == pytest.approx(seconds[number], rel=1e-3)


def test_larger_steps_take_longer(cpu: RecordedCpu) -> None:
    device = cpu.device(30.0)
    taken = [device.run(StepWork(4, 1200, ((500, length),)), 0.0).seconds for length in (16, 64, 256, 1024)]
    assert taken == sorted(taken)


def test_the_same_seed_gives_the_same_outcome() -> None:
    load = cpu_load(1, 8.0, 500.0)
    first = run_in_virtual_time(RECORDING, load, TARGET)
    assert first == run_in_virtual_time(RECORDING, load, TARGET)
    assert first.gaps
    assert first.gap(0.5) < 0.5


def test_what_an_engine_recorded_becomes_steps(tmp_path: Path) -> None:
    executor = FakeExecutor(cost=lambda shape: 0.01 + 0.001 * shape.total_rows)
    config = SchedulerConfig(num_blocks=20_000, policy=PolicySpec.parse("fixed:256"), enable_prefix_caching=False)
    engine = Engine(Scheduler(config, executor.caps), executor, Limits(8192, 1000), clock=executor.clock)
    events = tmp_path / "events.jsonl"
    engine.recorder = Recorder(events, engine.scheduler)

    def sleep(seconds: float) -> None:
        executor.clock.now += max(seconds, 1e-6)  # less may round to no time at all

    run = RecordedRun(engine, cpu_load(7, 8.0, 500.0), sleep)
    run.run()
    engine.recorder.close()
    steps = list(recorded_steps(events))
    assert len(steps) >= 30
    assert all(before.gpu_end_us <= after.gpu_begin_us + 1 for before, after in pairwise(steps))
    assert all(step.schedule_us <= step.gpu_begin_us + 1 < step.gpu_end_us == step.seen_us for step in steps)
    assert len({step.budget for step in steps}) > 2
    prompts = sum(stream.num_prompt_tokens for stream in run.streams if stream.token_times)
    assert prompts <= sum(chunk.length for step in steps for chunk in step.chunks)
    sampled = sum(step.num_decodes + sum(chunk.ends_prompt for chunk in step.chunks) for step in steps)
    assert sampled >= sum(len(stream.token_times) for stream in run.streams)
    assert decode_steps(encode_steps(steps)) == steps


@pytest.mark.parametrize(
    "arguments",
    [
        *("--recording nope", "--recording h200_vllm026_graphs512", "--seeds 5 5"),
        "--recording x86_smollm2 --model FOLDER",
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["cpu_random_loads.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_turns_of_agents_pass_a_cold_prompt_in_its_second_half_too() -> None:
    """Such a prompt takes half a minute here: longer than patience lasted once, whose seconds were those of a GPU."""
    load = Agents(number=3, turn_tokens=90, answer_tokens=30, think_s=1.0, miss_tokens=8_000).load(seed=101)
    run = recorded_run(RECORDING, load, TARGET)
    run.run()
    turns, misses = beside_misses(run.streams)
    assert len(turns) >= 20
    assert min(misses) > 20
    assert max(turns) < 0.1 * min(misses)
