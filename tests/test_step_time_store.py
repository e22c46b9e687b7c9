"""Step times are saved now and then and at the end, in virtual time; a folder that cannot be written costs one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.step_time import StepTimeModel
from evenflow.step_time_store import SAVE_INTERVAL_S, StepTimeKeeper, load_step_times, min_target, save_step_times


def learn(model: StepTimeModel) -> None:
    for number in range(20):
        shape = ExecutorCaps().step_shape(num_decodes=4, decode_context=400, chunks=[(0, 16 + number)])
        model.observe(shape, 0.05 + 0.001 * number)


def test_a_busy_engine_saves_every_few_minutes(tmp_path: Path) -> None:
    model, path = StepTimeModel(), tmp_path / "times" / "one.json"
    keeper = StepTimeKeeper(model, path)
    learn(model)
    keeper.after_step(1000.0)
    keeper.after_step(1000.0 + SAVE_INTERVAL_S - 1)
    assert not path.exists()
    keeper.after_step(1000.0 + SAVE_INTERVAL_S)
    first = load_step_times(path)
    assert first is not None
    assert first.to_record() == model.to_record()
    learn(model)
    keeper.after_step(1001.0 + SAVE_INTERVAL_S)
    again = load_step_times(path)
    assert again is not None
    assert again.to_record() == first.to_record()


def test_the_end_saves_only_what_is_new(tmp_path: Path) -> None:
    model, path = StepTimeModel(), tmp_path / "one.json"
    keeper = StepTimeKeeper(model, path)
    learn(model)
    keeper.save()
    assert not path.exists()  # no step ran
    keeper.after_step(1.0)
    keeper.save()
    assert path.exists()


def test_two_engines_that_save_at_once_harm_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one process, or of two containers whose processes have the same number."""
    model, path = StepTimeModel(), tmp_path / "one.json"
    learn(model)
    replace = Path.replace

    def after_the_other(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        assert save_step_times(model, path)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", after_the_other)
    assert save_step_times(model, path)
    kept = load_step_times(path)
    assert kept is not None
    assert kept.to_record() == model.to_record()
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    model = StepTimeModel()
    learn(model)
    keeper = StepTimeKeeper(model, tmp_path / "file" / "one.json")
    for number in range(4):
        keeper.after_step(number * SAVE_INTERVAL_S)
    keeper.save()
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_one_fast_start_is_believed_at_once_and_slowness_after_many(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    assert min_target(path, 0.54) == 0.54
    assert min_target(path, 0.22) == 0.22
    assert [min_target(path, 0.5) for _ in range(8)] == [0.22] * 7 + [0.5]


@pytest.mark.parametrize("content", ["", "{}", "[null]", "3", '["x"]'])
def test_targets_that_cannot_be_read_are_forgotten(tmp_path: Path, content: str) -> None:
    (tmp_path / "one.targets").write_text(content)
    assert min_target(tmp_path / "one.json", 0.3) == 0.3
    (tmp_path / "file").write_text("")
    assert min_target(tmp_path / "file" / "one.json", 0.4) == 0.4  # nothing can be written there
