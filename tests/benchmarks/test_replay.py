"""Loads replayed in virtual time on recorded steps of an H200 agree with what was measured there."""

import pytest
from named_loads import named_load
from outcomes import quantile_of
from random_loads import Client, Load, Turn, random_load
from recorded_device import RecordedDevice, StepWork
from replay_loads import main, run
from step_recording import Chunk, RecordedLoad, Recording, Step
from virtual_run import host_run

RECORDING = "h200_vllm026_graphs2048"


def recorded_steps(loading: int = 0) -> Recording:
    """Decodes of 5 ms and chunks of 20 ms in turn, behind each other; the host launches each in 1 ms and waits.

    `loading`: how many of the first launches took 3 ms.
    """
    steps: list[Step] = []
    ended = 0
    for number in range(400):
        is_mixed = number % 2 == 1
        begun, ended = ended, ended + (20_000 if is_mixed else 5_000)
        steps.append(
            Step(
                scheduled_us=begun - (6_000 if number < loading else 4_000),
                sampled_us=begun - 3_000,
                seen_us=ended + 500,
                gpu_begin_us=begun,
                gpu_end_us=ended,
                num_decodes=8,
                decode_context=8_000,
                chunks=[Chunk(4_000, 512, ends_prompt=False)] if is_mixed else [],
            )
        )
    return Recording({"capture_sizes": [8, 64, 256], "device": "a GPU"}, [RecordedLoad({}, steps)])


def test_a_recorded_shape_takes_what_was_recorded() -> None:
    device = RecordedDevice(recorded_steps())
    decodes, mixed = StepWork(8, 8_000, ()), StepWork(8, 8_000, ((4_000, 512),))
    for _ in range(5):
        assert device.device_seconds(decodes) == pytest.approx(0.005)
        assert device.device_seconds(mixed) == pytest.approx(0.020)
        assert device.launch_seconds(mixed, 0.0) == pytest.approx(0.001)


def test_launches_that_loaded_kernels_are_left_out_where_there_is_no_graph() -> None:
    device = RecordedDevice(recorded_steps(loading=20))
    decodes, mixed = StepWork(8, 8_000, ()), StepWork(8, 8_000, ((4_000, 512),))
    assert {round(1000 * device.launch_seconds(decodes, 0.0)) for _ in range(300)} == {1, 3}
    assert {round(1000 * device.launch_seconds(mixed, 0.0)) for _ in range(300)} == {1}


def test_another_shape_takes_what_its_neighbours_suggest() -> None:
    device = RecordedDevice.load(RECORDING)
    sizes = [device.device_seconds(StepWork(64, 64_000, ((8_000, length),))) for length in (256, 512, 1024, 2048)]
    assert sizes == sorted(sizes)
    assert 0.001 < sizes[0] < sizes[-1] < 0.1


@pytest.mark.parametrize(
    ("load", "budget", "measured_p99", "measured_ttft"),
    [("32k", 512, 0.032, 2.61), ("32k", 1024, 0.057, 1.49), ("32k", 2048, 0.108, 1.36), ("65k", 1024, 0.086, 3.95)],
)
def test_a_fixed_budget_has_the_gaps_and_waits_that_were_measured(
    load: str, budget: int, measured_p99: float, measured_ttft: float
) -> None:
    outcome = run(RECORDING, 0, f"fixed:{budget}", named_load(load))
    assert quantile_of(outcome.gaps_beside, 0.99) == pytest.approx(measured_p99, rel=0.1)
    assert outcome.ttft() == pytest.approx(measured_ttft, rel=0.1)


@pytest.mark.slow
def test_a_named_load_ends_with_its_answers() -> None:
    load = named_load("prefill:2048")
    assert len(run(RECORDING, 0, "fixed:8192", load).long_ttft) == 5
    replay = host_run(RecordedDevice.load(RECORDING), load.load, "fixed:8192")
    replay.run(until_answered=True)
    assert all(len(stream.token_times) == stream.max_tokens for stream in replay.streams)


@pytest.mark.slow
def test_every_stream_gets_its_tokens_in_order() -> None:
    load = random_load(3, seconds=4.0)
    replay = host_run(RecordedDevice.load(RECORDING), load, "fixed:2048")
    replay.run()
    assert any(len(stream.token_times) == stream.max_tokens for stream in replay.streams)
    assert all(len(stream.token_times) <= stream.max_tokens for stream in replay.streams)
    assert all(stream.token_times == sorted(stream.token_times) for stream in replay.streams)
    assert all(stream.token_times[0] > stream.due for stream in replay.streams if stream.token_times)


@pytest.mark.parametrize("seed", [7001])
def test_a_target_is_kept_from_a_start_that_has_seen_nothing(seed: int) -> None:
    outcome = run(RECORDING, seed, "target:50ms")
    assert outcome.gap(0.99) <= 1.2 * 0.050
    assert outcome.long_ttft


def test_a_replay_keeps_no_step_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evenflow.hosts.steering._STEPS_BETWEEN_SAVES", 10)
    monkeypatch.setattr("evenflow.hosts.steering.save_step_times", lambda model, path: pytest.fail(f"wrote {path}"))
    run(RECORDING, 7002, "target:50ms")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_outcome() -> None:
    assert run(RECORDING, 7002, "target:50ms") == run(RECORDING, 7002, "target:50ms")


@pytest.mark.slow
def test_a_long_prompt_goes_first_once_it_is_due() -> None:
    """One of 60,000 tokens, and one of 4,000 every 0.1 s, which keep the device busy by themselves."""
    short = (Client(0.01 + 0.1 * number, (Turn(4_000, 1),)) for number in range(150))
    long_prompts = (Client(0.0, (Turn(60_000, 1),)), *short)
    replay = host_run(RecordedDevice.load(RECORDING), Load(0, 20.0, "steady", (), long_prompts), "target:50ms")
    replay.run()
    first_tokens = {stream.id: stream.token_times[0] for stream in replay.streams if stream.token_times}
    earlier = [at for at in first_tokens.values() if at < first_tokens["r0"]]
    assert 20 < len(earlier) < 90


def test_agents_do_not_wait_for_a_prompt_that_nothing_is_cached_of() -> None:
    from replay_agents import agents_load
    from replay_agents import run as run_agents

    assert all(turn.prompt_tokens - turn.cached_tokens < 520 for turn in agents_load(1).chats[0].turns)
    waits, _ = run_agents(RECORDING, 1, "fixed:8192")
    turns, misses = run_agents(RECORDING, 1, "target:50ms")
    assert 5 * sorted(turns)[-2] < sorted(waits)[-2]
    assert len(misses) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        *("32k=kept+target:50ms", "32k=default", "--recording nope", "--seeds 10 5", "--targets 0", "--targets nan"),
        *("--targets fast", "--processes 0"),
    ],
)
def test_bad_arguments_end_with_one_line(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["replay_loads.py", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: argument" in capsys.readouterr().err.splitlines()[-1]
