"""Nothing that fails in evenflow ends SGLang: neither what is only nice to have, nor the steering as a whole."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest

from evenflow.core.planner import Planner
from evenflow.hosts import steering as hosts_steering
from evenflow.hosts.in_flight import InFlightSteps
from evenflow.hosts.policy_file import PolicyFile
from evenflow.hosts.reporter import Reporter
from evenflow.hosts.settings import RequestSettings
from evenflow.hosts.steering import Steering
from tests.sglang.driving import Driver, request

pytestmark = pytest.mark.filterwarnings("ignore")

# Of the adapter, what SGLang calls at a border where nothing else is lost. `_share` is how ranks agree.
ADAPTER = (
    *("begin_step", "scheduled", "launched", "add", "idle", "_steer", "_order", "_prefills", "_ended", "_emitted"),
    *("_steers", "_num_free_tokens", "_record_end", "_device_seconds", "_find_passing"),
)
LATER = [
    (kind, name)
    for kind in (Steering, Planner, Reporter, PolicyFile, RequestSettings, InFlightSteps)
    for name, member in vars(kind).items()
    if isinstance(member, FunctionType | property) and name != "__init__"
]


def broken(*args: Any, **settings: Any) -> Any:
    raise RuntimeError("broken")


def check_serves(driver: Driver, logged: list[str]) -> None:
    driver.run([[request("stream", 20, 12)], [], [request("long", 700, 3, 1)], [request("short", 30, 2, 2)]])
    assert {name: len(tokens) for name, tokens in driver.outputs.items()} == {"stream": 12, "long": 3, "short": 2}
    failures = [line for line in logged if "RuntimeError: broken" in line]
    assert len(failures) == len(set(failures)) <= 6


@pytest.mark.parametrize("name", ["_prior", "_step_time_key", "step_times_path", "load_step_times"])
def test_what_fails_at_the_start(driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from evenflow.sglang import steering

    monkeypatch.setattr(hosts_steering if name == "load_step_times" else steering, name, broken)
    driver.steer("20ms")
    assert len([line for line in logged if "RuntimeError: broken" in line]) == 1
    check_serves(driver, logged)


def test_warm_ups_that_fail(driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from evenflow.sglang import hooks

    monkeypatch.setattr(hooks, "warm_up_output_layer", broken)
    monkeypatch.setattr(hooks, "rehearse", broken)
    monkeypatch.setattr(driver.scheduler.tp_worker.model_runner, "device", "meta")
    hooks._after_init(None, driver.scheduler)
    end = "failed, serving goes on without it: RuntimeError: broken"
    assert f"evenflow: warming up the output layer {end}" in logged
    assert f"evenflow: running steps before the first request {end}" in logged


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ADAPTER)
def test_an_adapter_that_fails(
    driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch, name: str, overlap: bool
) -> None:
    driver.steer("20ms")
    kind = type(driver.scheduler.evenflow)
    monkeypatch.setattr(kind, name, property(broken) if isinstance(getattr(kind, name), property) else broken)
    check_serves(driver, logged)


@pytest.mark.parametrize(("kind", "name"), LATER)
def test_what_fails_later(
    driver: Driver, logged: list[str], monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    driver.steer("20ms")
    monkeypatch.setattr(kind, name, property(broken) if isinstance(vars(kind)[name], property) else broken)
    check_serves(driver, logged)
