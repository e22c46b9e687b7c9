"""Steering a host engine step by step, on a clock of its own: what it learns from, and whom it serves first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from evenflow.core.plan import ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate
from evenflow.core.report import AdmissionReport, StepReport
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from evenflow.core.target_policy import PATIENCE
from evenflow.hosts.in_flight import InFlightStep, Observation
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering

CAPS = ExecutorCaps()
ROW = 1e-5  # seconds
PRIOR = StepCosts(step=0.001, row=ROW)
LOAD = HostLoad(1, 1, 0.0)
TARGET = PolicySpec.parse("target:50ms")


class Driven(Steering):
    """Steering whose time is set by hand, of a host that knows when a request arrived."""

    now = 100.0

    def clock(self) -> float:
        return self.now


def steering(
    tmp_path: Path,
    prior: StepCosts | None = PRIOR,
    policy: PolicySpec | None = TARGET,
    own_policy: PolicySpec | None = None,
) -> Driven:
    host = Host(CAPS, 8192, 64, tmp_path / "step-times", logging.getLogger("test"), prior, own_policy=own_policy)
    return Driven(host, Settings(policy, None, None))


def add(driven: Driven, name: str, num_tokens: int, **more: Any) -> None:
    far_future = 1e12  # of the wall clock: taken for now
    driven.add(HostRequest(name, far_future, num_tokens, num_tokens, 0, 100, **more))


def launch(driven: Driven, key: str, *chunks: tuple[str, int, int]) -> None:
    step = InFlightStep(driven.now, key=key, chunks=list(chunks))
    driven.scheduled(step, [Decode("chat", 1, 100)], 0)


def turn_of(driven: Driven, name: str) -> float:
    """Its arrival and patience, after its class and its tenant's turn."""
    return driven.planner.requests[name].rank[0]


def test_patience_is_in_proportion_to_the_prefill_that_the_prior_predicts(tmp_path: Path) -> None:
    driven = steering(tmp_path)
    add(driven, "long", 50_000)
    add(driven, "short", 500)
    add(driven, "hurried", 50_000, ttft_target=0.25)
    assert turn_of(driven, "long") == pytest.approx(100 + PATIENCE * 0.501)
    assert turn_of(driven, "short") == pytest.approx(100 + PATIENCE * 0.006)
    assert turn_of(driven, "hurried") == pytest.approx(100.25)


def test_the_rank_of_a_prompt_follows_the_prediction_while_it_is_served(tmp_path: Path) -> None:
    driven = steering(tmp_path)
    add(driven, "chat", 100)
    add(driven, "long", 50_000)
    add(driven, "waiting", 50_000)
    driven.planner.prices.step_time = StepTimeModel(PRIOR._replace(row=2 * PRIOR.row, step=2 * PRIOR.step))
    launch(driven, "step", ("long", 0, 8000))
    assert turn_of(driven, "long") == pytest.approx(100 + 2 * PATIENCE * 0.501)
    assert turn_of(driven, "waiting") == pytest.approx(100 + PATIENCE * 0.501)


def plan_for(driven: Driven, *names: str) -> None:
    candidates = [Candidate(name, 0, 1000, 1000) for name in names]
    driven.plan(driven.now, [], candidates, free_tokens=100_000, long_prefill_token_threshold=0)
    driven.line_up(driven.now, names, len(names))


def test_steps_that_the_host_saw_end_late_are_learned_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = steering(tmp_path)
    add(driven, "chat", 100)
    learned: list[Observation] = []
    monkeypatch.setattr(driven.step_time, "observe", lambda *observed: learned.append(Observation(*observed)))
    launch(driven, "first", ("chat", 0, 64))
    launch(driven, "second", ("chat", 64, 32))
    driven.now += 0.030
    driven.launched("second")  # the host was busy until now: the first may have ended long ago
    end(driven, "first")
    assert learned == []
    launch(driven, "third", ("chat", 96, 4))
    driven.now += 0.020
    end(driven, "second")
    assert learned == []  # not before the tokens of this step have left
    driven.begin_step()
    (observed,) = learned
    assert [shape.prefill_rows for shape in observed.shapes] == [64, 32]
    assert observed.seconds == pytest.approx(0.050)
    assert observed.launches == (0.0, pytest.approx(0.030))


def end(driven: Driven, key: str) -> None:
    driven.emitted(driven.ended(key), {}, {"chat": None}, LOAD)


def test_a_target_is_called_infeasible_only_on_evidence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driven = steering(tmp_path, StepCosts(step=0.2))
    add(driven, "chat", 100)

    def plan() -> None:
        decodes, candidates = [Decode("chat", 1, 100)], [Candidate("chat", 0, 1000, 1000)]
        driven.plan(driven.now, decodes, candidates, free_tokens=100_000, long_prefill_token_threshold=0)

    for _ in range(40):
        plan()
    assert not caplog.records  # the prior alone says so
    for start in range(0, 20 * 64, 64):
        launch(driven, "step", ("chat", start, 64))
        driven.now += 0.2
        end(driven, "step")
    driven.begin_step()
    for _ in range(60):
        plan()
    assert not caplog.records  # it may pass
    for _ in range(60):
        plan()
    (record,) = caplog.records
    assert (
        "a target of 50 ms is infeasible beside prefill. The lowest feasible one is estimated at 2"
        in record.getMessage()
    )


def reports_of(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> list[StepReport]:
    reports: list[StepReport] = []
    monkeypatch.setattr(driven._reporter, "report", reports.append)
    return reports


def test_a_request_is_admitted_once_with_its_cached_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = steering(tmp_path)
    reports = reports_of(driven, monkeypatch)
    add(driven, "chat", 100)
    for start in (32, 64):
        launch(driven, "step", ("chat", start, 32))
        driven.now += 0.01
        end(driven, "step")
    assert [report.admissions for report in reports] == [[AdmissionReport("chat", 100, 32, False)], []]


@pytest.mark.parametrize(
    ("own_policy", "name"),
    [(PolicySpec("fixed", 512), "fixed:512"), (PolicySpec("unchunked"), "unchunked"), (None, "none")],
)
def test_without_a_target_reports_name_the_hosts_own_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_policy: PolicySpec | None, name: str
) -> None:
    driven = steering(tmp_path, policy=None, own_policy=own_policy)
    reports = reports_of(driven, monkeypatch)
    assert not driven.is_active
    add(driven, "chat", 100)
    launch(driven, "step", ("chat", 0, 100))
    end(driven, "step")
    driven.set_policy(PolicySpec.parse("target:50ms"))
    launch(driven, "step", ("chat", 0, 100))
    end(driven, "step")
    assert [(report.policy, report.target_s) for report in reports] == [(name, None), ("target:50ms", 0.05)]


def order_of(driven: Driven, names: list[str], room: int) -> list[str]:
    places = driven.line_up(driven.now, names, room)
    assert list(places.values()) == list(range(len(names)))
    return list(places)


def test_ranks_are_by_class_then_by_the_time_that_tenants_got(tmp_path: Path) -> None:
    driven = steering(tmp_path)
    add(driven, "job", 8000, service_class="batch")
    add(driven, "first", 8000, tenant="a")
    add(driven, "second", 8000, tenant="b")
    add(driven, "chat", 8000, service_class="interactive")
    names = ["chat", "first", "second", "job"]
    assert order_of(driven, ["job", "second", "first", "chat"], room=4) == names
    assert order_of(driven, ["job", "second", "first", "chat"], room=2) == ["chat", "first", "job", "second"]
    launch(driven, "step", ("first", 0, 4000))
    assert order_of(driven, names, room=4) == ["chat", "second", "first", "job"], "a tenant has had a turn"
    assert [driven.level(name) for name in names] == [0, 1, 1, 2]


def test_requests_that_left_are_in_no_line(tmp_path: Path) -> None:
    driven = steering(tmp_path)
    add(driven, "a", 800, tenant="a")
    add(driven, "b", 800, tenant="b")
    launch(driven, "step", ("a", 0, 800))
    step = driven.ended("step")
    driven.emitted(step, {"a": [1]}, {}, HostLoad(0, 0, 0.0))
    assert driven.num_streams == 0
    add(driven, "a", 800, tenant="a")  # the host may use a name again
    launch(driven, "again", ("a", 0, 800))
    assert driven.num_streams == 1
