"""Figures, listeners, logs, recordings and saved step times that fail cost no request and no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from evenflow.engine.stats import Stats
from evenflow.line_file import LineFile
from evenflow.server.live.feed import LiveFeed
from evenflow.server.metrics.by_class import ClassFigures
from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.observer import Listener, Observer
from evenflow.step_time_store import StepTimeKeeper
from tests.server.stepping import ObservedEngine

HOW_IT_TELLS = ("_tell", "_connect_gauges")
BREAKABLE = [
    (kind, name)
    for kind in (Observer, ClassFigures, RecentQuantiles, LiveFeed, Stats, StepTimeKeeper)
    for name, member in vars(kind).items()
    if isinstance(member, FunctionType)
    and name not in ("__init__", *HOW_IT_TELLS)
    and not (kind is Observer and not name.startswith("_"))  # its entrances guard what is behind them
]


def broken(*args: Any, **settings: Any) -> Any:
    raise RuntimeError("broken")


def check_serves(observed: ObservedEngine, caplog: pytest.LogCaptureFixture, break_it: Callable[[], None]) -> None:
    observed.add("first", 100)
    observed.step()
    break_it()
    observed.add("second", 30)
    observed.run()
    observed.engine.close()
    assert observed.num_tokens == {"first": 8, "second": 8}
    failures = [line for line in caplog.messages if "broken" in line]
    assert len(failures) == len(set(failures)) <= 4


@pytest.mark.parametrize(("kind", "name"), BREAKABLE)
def test_what_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, kind: type, name: str
) -> None:
    observed = ObservedEngine("target:40ms")
    LiveFeed(observed.observer)
    observed.engine.keeper = StepTimeKeeper(observed.engine.scheduler.step_time, tmp_path / "steps.json")
    check_serves(observed, caplog, lambda: monkeypatch.setattr(kind, name, broken))


@pytest.mark.parametrize("name", [name for name in vars(Listener) if name.startswith("on_")])
def test_one_listener_costs_no_other_its_events(caplog: pytest.LogCaptureFixture, name: str) -> None:
    observed, told = ObservedEngine("target:40ms"), list[Any]()
    for work in (broken, told.append):
        listener = Listener()
        setattr(listener, name, work)
        observed.observer.listen(listener)
    check_serves(observed, caplog, lambda: observed.observer.on_request_retried("first"))
    assert told


def test_a_recording_that_fails_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    observed = ObservedEngine("target:40ms", record=tmp_path / "steps.jsonl")
    check_serves(observed, caplog, lambda: monkeypatch.setattr(LineFile, "write", broken))
    assert any("Recording to" in line and "stops" in line for line in caplog.messages)
