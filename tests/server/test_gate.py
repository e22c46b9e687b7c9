"""Bounds of the queue: by requests and by tokens, in all, by class and by tenant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.server.errors import ApiError
from evenflow.server.gate import Gate, ServerLimits
from evenflow.shares_file import QueueLimits, Shares, TenantSettings
from tests.server.serving import MODEL, RunningServer, scripted_server

SHARES = Shares(
    class_limits={"batch": QueueLimits(max_requests=3, max_tokens=1000)},
    tenants={"acme": TenantSettings(max_requests=2, max_tokens=500)},
)


def make_gate(**limits: int) -> tuple[Gate, Counter[str]]:
    refusals: Counter[str] = Counter()
    gate = Gate(
        ServerLimits(**limits), lambda: 4, lambda reason: refusals.update([reason]), SHARES
    )  # four requests can run
    return gate, refusals


def refusal(gate: Gate, *arguments: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        gate.enter(*arguments)
    return refused.value


def test_a_class_has_its_own_bound() -> None:
    gate, refusals = make_gate()
    with gate.enter("a", 2, "batch"), gate.enter("b", 1, "batch"):
        refused = refusal(gate, "c", 1, "batch")
        assert refused.status == 503
        assert refused.headers["Retry-After"]
        assert str(refused) == "The class 'batch' has 3 requests running or waiting, and 3 are allowed."
        with gate.enter("c", 4, "standard"):
            assert gate.num_inside == 7
    with gate.enter("c", 3, "batch"):
        assert refusals == {"class_limit": 1}
    assert gate.num_inside == 0


def test_a_tenants_bound_in_the_file_replaces_the_one_for_all() -> None:
    gate, refusals = make_gate(max_tenant_requests=1)
    with gate.enter("acme", 2, "standard"), gate.enter("other", 1, "standard"):
        for tenant in ("acme", "other"):
            assert refusal(gate, tenant, 1, "standard").status == 429
    assert refusals == {"tenant_limit": 2}


@pytest.mark.parametrize(
    ("tenant", "service_class", "limit", "status", "reason"),
    [
        ("acme", "standard", 500, 429, "tenant_limit"),
        ("b", "batch", 1000, 503, "class_limit"),
        ("b", "standard", 2000, 503, "queue_full"),
    ],
)
def test_tokens_are_bounded(tenant: str, service_class: str, limit: int, status: int, reason: str) -> None:
    gate, refusals = make_gate(max_open_tokens=2000)
    with gate.enter(tenant, 1, service_class) as first:
        first.take_tokens(limit - 100)
        with gate.enter(tenant, 1, service_class) as second:
            with pytest.raises(ApiError, match="may need 101 tokens") as refused:
                second.take_tokens(101)
            assert refused.value.status == status
            assert str(limit - 100) in str(refused.value)
            second.take_tokens(100)
        with gate.enter(tenant, 1, service_class) as third:
            third.take_tokens(100)  # what a refusal and a request that ended held is free again
    with gate.enter(tenant, 1, service_class) as alone:
        with pytest.raises(ApiError, match="lower max_tokens") as never:
            alone.take_tokens(limit + 1)
        assert never.value.status == 400  # waiting would not help
        alone.take_tokens(limit)
    assert refusals == {reason: 1}


def test_the_bound_holds_over_http() -> None:
    settings = {"api_keys": ["secret name=acme", "other"], "shares": SHARES}
    with scripted_server(settings=settings, step_s=0.01) as server:
        url, headers = f"{server.url}/v1/completions", {"Authorization": "Bearer secret"}
        body = {"prompt": [5] * 100, "max_tokens": 300, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30, verify=False) as held:
            events = held.iter_lines()
            next(events)
            refused = server.post("/v1/completions", {**body, "stream": False}, headers=headers)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            small = {"prompt": [5] * 10, "max_tokens": 1}
            assert server.post("/v1/completions", small, headers=headers).status_code == 200
            other = {"Authorization": "Bearer other"}
            assert server.post("/v1/completions", {**body, "stream": False, "max_tokens": 5}, headers=other).is_success


@contextmanager
def busy_server(**engine: Any) -> Iterator[RunningServer]:
    """A server that decodes a stream: its step times are known, and it is not idle."""
    with scripted_server(step_s=0.02, **engine) as server:
        body = {"prompt": [5] * 10, "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30, verify=False) as held:
            events = held.iter_lines()
            for _ in range(4):
                next(events)
            yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_would_be_late_is_refused_with_the_estimate(stream: bool) -> None:
    urgent, *others = DEFAULT_CLASSES
    classes = (replace(urgent, ttft_target=0.001, refuse_late=True), *others)
    with busy_server(classes=classes) as server:
        body = {"prompt": [5] * 900, "max_tokens": 2, "stream": stream, "service_class": "interactive"}
        refused = server.post("/v1/completions", body)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["expected_ttft_s"] > error["ttft_target_s"] == 0.001
        assert "is expected after" in error["message"]
        assert (
            'evenflow:rejected_requests_total{engine="0",model_name="a-model",reason="late"} 1.0'
            in server.get("/metrics").text
        )
        assert server.post("/v1/completions", {**body, "service_class": "standard"}).status_code == 200
        message = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "a" * 300}],
            "max_tokens": 2,
            "priority": -1,
        }
        late = server.post("/v1/messages", message)
        assert (late.status_code, late.json()["error"]["type"]) == (429, "rate_limit_error")


def test_a_request_that_expires_in_the_queue_says_so() -> None:
    with scripted_server(step_s=0.01, max_num_seqs=1) as server:
        body = {"prompt": [5] * 10, "max_tokens": 400, "ignore_eos": True, "stream": True}
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=30, verify=False) as held:
            events = held.iter_lines()
            next(events)
            for stream in (False, True):
                expired = server.post("/v1/completions", body | {"stream": stream, "deadline": "100ms"})
                assert (expired.status_code, expired.headers["x-should-retry"]) == (504, "false")
                error = expired.json()["error"]
                assert (error["code"], error["deadline_s"]) == ("deadline_exceeded", 0.1)
                assert error["message"] == "The request's deadline of 0.1 s passed before the first token."
            message = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
            late = server.post("/v1/messages", message | {"deadline": 0.1})
            assert (late.status_code, late.json()["error"]["type"]) == (504, "timeout_error")
        assert 'reason="expired"} 3.0' in server.get("/metrics").text


def test_a_stream_that_passes_its_deadline_ends_with_an_error() -> None:
    with scripted_server(step_s=0.01) as server:
        body = {"prompt": [5] * 10, "max_tokens": 400, "ignore_eos": True, "stream": True, "deadline": 0.3}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30, verify=False) as response:
            events = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert len(events) > 2
        assert "deadline of 0.3 s passed after" in events[-2]


def test_an_idle_server_refuses_nothing_as_late() -> None:
    urgent, *others = DEFAULT_CLASSES
    classes = (replace(urgent, ttft_target=0.001, refuse_late=True), *others)
    with scripted_server(classes=classes, step_s=0.01) as server:
        body = {"prompt": [5] * 900, "max_tokens": 2, "service_class": "interactive"}
        for _ in range(3):
            assert server.post("/v1/completions", body).status_code == 200


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    with busy_server() as server:
        refused = server.post("/v1/completions", {"prompt": [5] * 900, "max_tokens": 2, "deadline": "1ms"})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        error = refused.json()["error"]
        assert error["expected_ttft_s"] > error["deadline_s"] == 0.001
        wrong = server.post("/v1/completions", {"prompt": [5], "deadline": "soon"})
        assert wrong.status_code == 400
        assert "Got deadline='soon' but expected a duration such as 50ms" in wrong.json()["error"]["message"]


def test_nobody_can_keep_the_others_out_of_the_queue() -> None:
    """Before, one key that filled the queue got everybody a 503."""
    gate, _ = make_gate(max_waiting=8)
    with gate.enter("many", 6, ""), gate.enter("many", 6, ""):
        assert refusal(gate, "many", 1, "").status == 503
        with gate.enter("one", 2, ""):
            assert refusal(gate, "many", 1, "").status == 503
            assert refusal(gate, "one", 5, "").status == 503, "more than its share"
            with gate.enter("another", 3, ""):
                assert gate.num_inside == 17
