"""Step times that were measured in a busy hour do not stay: a start checks them, and what is learned is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow import LLM, SamplingParams
from evenflow.core.default_target import READER_S, default_target
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.step_time import StepTimeModel
from evenflow.engine.calibration import Calibration
from evenflow.executors.fake import FakeExecutor
from evenflow.host import CpuTimes
from tests.engine.fakes import VOCAB
from tests.models import tiny_llama


def seconds(shape: StepShape) -> float:
    return 0.030 + 0.002 * shape.total_rows


def calibration(slowness: float, depth: int = 1) -> Calibration:
    caps = ExecutorCaps(max_steps_in_flight=depth)
    executor = FakeExecutor(vocab_size=VOCAB, caps=caps, cost=lambda shape: slowness * seconds(shape))
    return Calibration(executor=executor, num_blocks=400, block_size=16, vocab_size=VOCAB, max_position=4096)


def target(model: StepTimeModel) -> float:
    return default_target(model, ExecutorCaps(), max_num_seqs=256)


@pytest.mark.parametrize(("known", "now"), [(2.5, 1.0), (1.0, 2.5)])
def test_a_check_finds_the_speed_of_now_in_a_few_steps(known: float, now: float) -> None:
    stored = calibration(known).measure()
    assert target(stored) == pytest.approx(known * target(calibration(1.0).measure()), rel=0.05)
    before = stored.to_record()
    checked = calibration(now).check(stored)
    assert target(checked) == pytest.approx(target(calibration(now).measure()), rel=0.15)
    assert stored.to_record() == before


def test_two_steps_in_flight_are_told_apart() -> None:
    found = calibration(1.0, depth=2)
    assert target(found.measure()) == pytest.approx(target(calibration(1.0).measure()), rel=0.02)
    found.warm_up()  # leaves nothing in flight
    assert target(found.check(found.measure())) == pytest.approx(target(calibration(1.0).measure()), rel=0.02)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("evenflow.step_time_store.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("evenflow.host.CpuTimes.now", lambda: None)  # the tests' machine may be busy
    return tmp_path / "step-times"


def slow_down(store: Path, slowness: float) -> float:
    """Make the stored step times those of a slower machine; returns the default target by them."""
    [path] = store.glob("*.json")
    record = json.loads(path.read_text())
    record["costs"] = [*(slowness * cost for cost in record["costs"][:-1]), record["costs"][-1]]
    record["samples"] = [[steps, slowness * seconds] for steps, seconds in record["samples"]]
    path.write_text(json.dumps(record))
    return target(StepTimeModel.from_record(record))


def test_a_slow_first_start_does_not_decide_the_second_ones_target(store: Path) -> None:
    with LLM(tiny_llama()) as llm:
        assert llm.engine.policy.target is not None
    slow_s = slow_down(store, 10_000)
    [targets] = store.glob("*.targets")
    targets.write_text(json.dumps([slow_s]))
    with LLM(tiny_llama()) as llm:
        assert llm.engine.policy.target is not None
        assert READER_S <= llm.engine.policy.target < slow_s / 10
        assert json.loads(targets.read_text()) == [slow_s, llm.engine.policy.target]


def test_a_busy_machine_is_noticed_first_and_gets_a_target_of_its_own(
    store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(tiny_llama()) as llm:
        assert "while it does nothing else" in llm.target_reason or "people read" in llm.target_reason
    slow_down(store, 10_000)
    [targets] = store.glob("*.targets")
    quiet = targets.read_text()
    times = [CpuTimes(at=0.0, busy=0.0, stolen=0.0, own=0.0), CpuTimes(at=2.0, busy=1.5, stolen=0.5, own=0.5)]
    monkeypatch.setattr("evenflow.host.CpuTimes.now", iter(times).__next__)
    monkeypatch.setattr("evenflow.engine.build.num_cpus", lambda: 2)
    monkeypatch.setattr("evenflow.engine.build.Calibration.check", lambda self, known: known)
    caplog.set_level("INFO", "evenflow")
    caplog.clear()
    with LLM(tiny_llama()) as llm:
        chosen = llm.engine.policy.target
        assert chosen is not None
        assert chosen > 10 * json.loads(quiet)[0]
    assert targets.read_text() == quiet  # it says nothing of later starts
    busy, target = (next(i for i, m in enumerate(caplog.messages) if text in m) for text in ("is busy", "tbt_target="))
    assert caplog.messages[busy] == llm.busy_notice
    assert "other programs take 0.8 of its 2 cores" in llm.busy_notice
    assert busy < target
    assert "beside the other programs that run now" in llm.target_reason


@pytest.mark.parametrize(("seconds", "others"), [(2.0, 0.5), (0.4, 0.8)])
def test_little_work_of_others_or_a_short_look_at_it_is_no_busy_machine(
    seconds: float, others: float, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = [CpuTimes(at=0.0, busy=0.0, stolen=0.0, own=0.0), CpuTimes(at=seconds, busy=others, stolen=0.0, own=0.0)]
    monkeypatch.setattr("evenflow.host.CpuTimes.now", iter(times).__next__)
    monkeypatch.setattr("evenflow.engine.build.num_cpus", lambda: 2)
    with LLM(tiny_llama()) as llm:
        assert llm.busy_notice == ""


def test_what_an_engine_has_learned_is_there_at_the_next_start(store: Path) -> None:
    with LLM(tiny_llama(), tbt_target=0.5) as llm:
        [path] = store.glob("*.json")
        measured = path.read_text()
        llm.generate(["hello"] * 3, SamplingParams(max_tokens=8))
        learned = llm.engine.scheduler.step_time.to_record()
    assert json.loads(path.read_text()) == json.loads(json.dumps(learned)) != json.loads(measured)
