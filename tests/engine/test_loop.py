"""The loop of every engine: commands in, one report a step out."""

from __future__ import annotations

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.core.request import SamplingParams
from evenflow.engine.loop import Commands, run_engine
from evenflow.engine.messages import Abort, Add, Event, Failed, Ready, Refused, SetPolicy, Stepped, Stop, StopAfter
from evenflow.errors import InvalidConfig
from tests.engine.fakes import fake_engine, prepare


def test_commands_are_carried_out_before_the_next_step() -> None:
    engine, commands = fake_engine(), Commands()
    events: list[Event] = []

    def send(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped) and event.report.step_id == 3:
            commands.put(Abort("a"))
            commands.put(StopAfter("b", 2))
        if isinstance(event, Stepped) and event.report.step_id == 6:
            commands.put(SetPolicy(PolicySpec.for_target(0.2, is_paced=True)))
        if isinstance(event, Stepped) and event.report.step_id == 8:
            commands.put(Stop())

    for name in "abc":
        commands.put(Add(prepare(engine, [1, 2, ord(name)], SamplingParams(max_tokens=200), name).record()))
    run_engine(lambda: engine, commands, send)
    assert isinstance(events[0], Ready)
    reports = [event.report for event in events if isinstance(event, Stepped)]
    assert [report.ids for report in reports] == [["a", "b", "c"]] * 4 + [["c"]] * 5
    assert [chunk.request_id for chunk in reports[0].chunks if chunk.gave_token] == ["a", "b", "c"]
    assert [report.policy for report in reports[-2:]] == ["target:200ms,paced"] * 2
    assert reports[-1].num_running == 1


def test_a_request_that_does_not_fit_is_refused_and_the_loop_goes_on() -> None:
    engine, commands = fake_engine(num_blocks=4), Commands()
    events: list[Event] = []
    commands.put(Add(prepare(engine, [1] * 60, SamplingParams(max_tokens=60), "large").record()))
    commands.put(Add(prepare(engine, [1], SamplingParams(max_tokens=1), "small").record()))

    def send(event: Event) -> None:
        events.append(event)
        if isinstance(event, Stepped):
            commands.put(Stop())

    run_engine(lambda: engine, commands, send)
    refused = [event for event in events if isinstance(event, Refused)]
    assert [event.id for event in refused] == ["large"]
    assert "KV cache holds 64" in refused[0].message
    assert [event.report.ids for event in events if isinstance(event, Stepped)] == [["small"]]


def test_an_engine_that_cannot_be_built_says_why() -> None:
    def build() -> None:
        raise InvalidConfig("Got a bad setting.")

    events: list[Event] = []
    run_engine(build, Commands(), events.append)  # type: ignore[arg-type]
    assert events == [Failed("InvalidConfig", "Got a bad setting.")]


def test_a_defect_is_logged_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    engine, commands = fake_engine(), Commands()
    engine.scheduler.commit = None  # type: ignore[assignment, method-assign]
    commands.put(Add(prepare(engine, [1], SamplingParams(max_tokens=1)).record()))
    events: list[Event] = []
    run_engine(lambda: engine, commands, events.append)
    assert isinstance(events[-1], Failed)
    assert events[-1].kind == "EngineFailed"
    assert "the engine stopped" in caplog.text
