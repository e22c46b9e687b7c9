"""A recorded run, planned again, gives the same plans; a changed one is noticed."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest

from evenflow.core.logprobs import LogprobRows, RowLogprobs, TokenLogprob
from evenflow.core.plan import StepResult
from evenflow.core.request import SamplingParams
from evenflow.engine.recorder import next_recording
from evenflow.errors import EngineFailed, InvalidInput
from evenflow.executors.recorded import read, replay, write_line
from tests.engine.fakes import fake_llm


def record_a_run(path: Path, depth: int) -> list[int]:
    """Small enough a pool for preemptions, an abort in the middle, a stop string, an adaptive policy."""
    llm = fake_llm("adaptive:20ms", depth=depth, num_blocks=12, record=path)
    for number in range(5):
        sampling = SamplingParams(max_tokens=40, stop=(" 7",) if number == 2 else ())
        llm.add(llm.prepare([number] * (20 + 9 * number), sampling, request_id=str(number)))
    for _ in range(12):
        llm.step()
    llm.abort("1")
    while llm.engine.has_work:
        llm.step()
    llm.engine.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["plan"]["step_id"] for line in lines if line.get("event") == "step"]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_same_recording_gives_the_same_plans(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "run.jsonl"
    step_ids = record_a_run(path, depth)
    assert len(step_ids) > 40
    assert [plan.step_id for plan in replay(path)] == step_ids


def test_every_step_is_recorded_with_its_plan_and_seconds(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_a_run(path, 1)
    steps = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("event") == "step"]
    assert all(step["seconds"] == pytest.approx(0.001 * _rows(step["plan"])) for step in steps)


def _rows(plan: dict[str, object]) -> int:
    decodes, chunks = plan["decodes"], plan["chunks"]
    assert isinstance(decodes, dict)
    assert isinstance(chunks, list)
    return len(decodes["slots"]) + sum(chunk["length"] for chunk in chunks)


def test_a_plan_that_differs_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    record_a_run(path, 1)
    changed = path.read_text().replace('"policy":"adaptive:20ms"', '"policy":"fixed:32"')
    path.write_text(changed)
    with pytest.raises(EngineFailed, match="differs from the recording in"):
        replay(path)


def test_an_unknown_version_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for text, message in (('{"version": 99}', "version 99"), ("{", "not a recording"), ("", "empty")):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=message):
            replay(path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be written"):
        fake_llm(record=tmp_path / "missing" / "run.jsonl")


def test_a_recording_that_another_engine_writes_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    llm = fake_llm(record=path)
    llm.generate([5] * 40, SamplingParams(max_tokens=3))
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match="another server or engine is writing to it"):
        fake_llm(record=path)
    assert path.read_bytes() == before
    llm.close()
    fake_llm(record=path).close()
    assert len(path.read_bytes().splitlines()) == 1  # begun anew


def test_a_result_comes_back_as_it_was() -> None:
    row = RowLogprobs(TokenLogprob(3, -0.5), (TokenLogprob(3, -0.5), TokenLogprob(9, -1.25)))
    result = StepResult(4, ((3,), ()), 0.25, {1: "bad"}, {0: LogprobRows.of([row])}, {1: LogprobRows.of([row, row])})
    assert read(json.loads(write_line(result)), StepResult) == result


class FullDisk(io.FileIO):
    """Has room for this many bytes, and writes half of what does not fit."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "wb")
        self._room = room

    def write(self, data: Any) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(data[: min(len(data), self._room)])
        self._room -= written
        return written


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Before, the engine died at the next request, and at the first one after each restart."""
    cut = tmp_path / "cut.jsonl"
    for room in (10, 5_000, 10_000):
        llm = fake_llm("adaptive:20ms", num_blocks=12, record=cut)
        recorder = llm.engine.recorder
        assert recorder is not None
        recorder.close()
        recorder._file._file, recorder._file.num_bytes = FullDisk(cut, room), 0
        outputs = llm.generate([[5] * 40, [6] * 40], SamplingParams(max_tokens=30))
        assert [len(output.token_ids) for output in outputs] == [30, 30]
        llm.engine.close()
        lines = cut.read_bytes().splitlines(keepends=True)
        assert all(line.endswith(b"\n") and json.loads(line) for line in lines)
    assert caplog.text.count("No space left on device") == 3, "it is said once"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has it")
def test_a_disk_that_is_full_from_the_start_is_no_reason_not_to_run() -> None:
    llm = fake_llm(record="/dev/full")
    assert len(llm.generate([[5] * 4], SamplingParams(max_tokens=3))[0].token_ids) == 3
    llm.engine.close()


def test_a_recording_that_has_steps_is_never_overwritten_by_a_restart(tmp_path: Path) -> None:
    """Before, each restart of the engine emptied it."""
    path = tmp_path / "run.jsonl"
    assert next_recording(path) == path
    path.write_text("")
    assert next_recording(path) == path
    path.write_text("a line")
    (tmp_path / "run-2.jsonl").write_text("an older one")
    assert next_recording(path) == tmp_path / "run-3.jsonl"
    assert next_recording(Path("/dev/null")) == Path("/dev/null")
