"""Nothing that fails in evenflow ends vLLM: neither what is only nice to have, nor the steering as a whole."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest

from tests.vllm.driving import Driver, make_request, make_scheduler

from evenflow.core.planner import Planner  # isort: skip
from evenflow.hosts import steering as hosts_steering  # isort: skip
from evenflow.hosts.in_flight import InFlightSteps  # isort: skip
from evenflow.hosts.policy_file import PolicyFile  # isort: skip
from evenflow.hosts.reporter import Reporter  # isort: skip
from evenflow.hosts.settings import RequestSettings  # isort: skip
from evenflow.hosts.steering import Steering  # isort: skip
from evenflow.vllm import steering  # isort: skip
from evenflow.vllm.steering import VllmSteering  # isort: skip

AT_START = [
    *((steering, name) for name in ("prior_of", "_step_times_path", "advice_on_graphs")),
    (type(steering.current_platform), "get_device_name"),
    (hosts_steering, "load_step_times"),
]
LATER = [
    (kind, name)
    for kind in (VllmSteering, Steering, Planner, Reporter, PolicyFile, RequestSettings, InFlightSteps)
    for name, member in vars(kind).items()
    if isinstance(member, FunctionType | property) and name not in ("__init__", "next_step")
]


def broken(*args: Any, **settings: Any) -> Any:
    raise RuntimeError("broken")


def answers(driver: Driver) -> list[int]:
    """How many tokens each of three requests gets: a stream, a long prompt, and a short one that comes late."""
    requests = [make_request(64, 30), make_request(3_000, 2), make_request(64, 2)]
    driver.add(*requests[:2])
    driver.run(num_steps=4)
    driver.add(requests[2])
    driver.run()
    driver.scheduler.shutdown()
    return [len(driver.tokens[request.request_id]) for request in requests]


@pytest.mark.parametrize(("holder", "name"), AT_START)
def test_what_fails_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: list[str], holder: object, name: str
) -> None:
    monkeypatch.setattr(holder, name, broken)
    driver = Driver(make_scheduler())
    assert len([line for line in caplog_vllm if "RuntimeError: broken" in line]) == 1
    assert answers(driver) == [30, 2, 2]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("kind", "name"), LATER)
def test_what_fails_later(
    monkeypatch: pytest.MonkeyPatch, caplog_vllm: list[str], kind: type, name: str, depth: int
) -> None:
    driver = Driver(make_scheduler(is_async=depth > 1), depth=depth)
    monkeypatch.setattr(kind, name, property(broken) if isinstance(vars(kind)[name], property) else broken)
    assert answers(driver) == [30, 2, 2]
    failures = [line for line in caplog_vllm if "RuntimeError: broken" in line]
    assert len(failures) == len(set(failures)) <= 6
