import random
from pathlib import Path

import pytest
from step_recording import VERSION, Chunk, Step, append_line, decode_steps, encode_steps, read_recording


def random_steps(seed: int, num_steps: int) -> list[Step]:
    rng = random.Random(seed)
    host = gpu = 0
    steps = []
    for _ in range(num_steps):
        host_times, gpu_times = [], []
        for _ in range(5):
            host += rng.randint(1, 4000)
            host_times.append(host)
        for _ in range(3):
            gpu += rng.randint(0, 4000)
            gpu_times.append(gpu)
        chunks = [
            Chunk(rng.randint(0, 60_000), rng.randint(1, 8192), rng.random() < 0.5) for _ in range(rng.randint(0, 3))
        ]
        decodes = rng.randint(0, 256)
        steps.append(Step(*host_times, *gpu_times, rng.randint(0, 2), 512, 264, decodes, 900 * decodes, 2000, chunks))
        host = host_times[1]  # the next step is scheduled before this one is seen
    return steps


@pytest.mark.parametrize("num_steps", [0, 1, 40])
def test_steps_survive_their_encoding(num_steps: int) -> None:
    steps = random_steps(3, num_steps)
    assert decode_steps(encode_steps(steps)) == steps


def test_a_prompt_that_is_alone_goes_on_where_it_ended() -> None:
    steps = [Step(chunks=[Chunk(0, 512, False)]), Step(num_decodes=4, chunks=[Chunk(512, 508, True)])]
    columns = encode_steps(steps)
    assert columns["chunk_start"] == [0, 0]
    assert columns["chunk_length"] == [512, -4]
    assert [step.num_rows for step in steps] == [512, 512]


def write(path: Path, loads: list[list[Step]]) -> None:
    append_line(path, {"version": VERSION, "capture_sizes": [1, 2, 4]})
    for seed, steps in enumerate(loads):
        append_line(path, {"seed": seed, "is_cold": seed == 0, "columns": encode_steps(steps)})


def test_reads_what_was_written(tmp_path: Path) -> None:
    loads = [random_steps(seed, 30) for seed in range(3)]
    write(tmp_path / "steps", loads)
    recording = read_recording(tmp_path / "steps")
    assert recording.header["capture_sizes"] == [1, 2, 4]
    assert [load.steps for load in recording.loads] == loads
    assert [load.header for load in recording.loads] == [{"seed": i, "is_cold": i == 0} for i in range(3)]


def test_an_interrupted_recording_keeps_its_complete_loads(tmp_path: Path) -> None:
    loads = [random_steps(seed, 30) for seed in range(3)]
    path = tmp_path / "steps"
    write(path, loads)
    path.write_bytes(path.read_bytes()[:-100])
    assert [load.steps for load in read_recording(path).loads] == loads[:2]


def test_refuses_another_version(tmp_path: Path) -> None:
    append_line(tmp_path / "steps", {"version": VERSION + 1})
    with pytest.raises(ValueError, match=f"not a recording of version {VERSION}"):
        read_recording(tmp_path / "steps")
