"""Classes and tenants over HTTP: which class a request gets in each API, and who is served first by a real engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.server.metrics.tenants import MAX_TENANTS, TenantFigures
from evenflow.shares_file import Shares, TenantSettings
from tests.models import tiny_llama
from tests.server.serving import RunningServer, model_server

KEYS = ["heavy-key name=heavy", "light-key name=light", "patient-key name=patient"]
TENANTS = {"heavy": TenantSettings(weight=1.0, most_urgent="standard"), "patient": TenantSettings(most_urgent="batch")}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[RunningServer]:
    """One slot: the order of service is the order in which requests end. Least shares come after much longer waits."""
    served = {"api_keys": KEYS, "admin_api_keys": ["admin-key"], "shares": Shares(tenants=TENANTS), "request_log": log}
    weights = {name: one.weight for name, one in TENANTS.items()}
    classes = tuple(replace(one, share=1e-6) for one in DEFAULT_CLASSES)
    settings = {"max_num_seqs": 1, "policy": "fixed:64", "tenant_weights": weights, "classes": classes}
    with model_server(str(tiny_llama()), served=served, **settings) as running:
        yield running


def as_key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-key"}


def lines(log: Path) -> list[dict[str, Any]]:
    """Of the requests that have ended."""
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [event for event in events if event["event"] == "ended"]


def served_class(server: RunningServer, log: Path, path: str, body: dict[str, Any], key: str = "light") -> str:
    """The class that a request was served in, by the request log."""
    num_lines = len(lines(log))
    response = server.post(path, body, headers=as_key(key))
    assert response.status_code == 200, response.text
    server.until(lambda: len(lines(log)) > num_lines)
    return str(lines(log)[-1]["service_class"])


def figures(server: RunningServer) -> dict[tuple[str, str], float]:
    """By name, and by class or key."""
    text = server.get("/metrics", headers=as_key("admin")).text
    return {
        (sample.name, sample.labels.get("service_class") or sample.labels.get("key", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def num_open(server: RunningServer, class_name: str) -> float:
    return figures(server).get(("evenflow:class_open_requests", class_name), 0)


MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "a-model", "messages": MESSAGES, "max_tokens": 1},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_names_classes_in_the_same_ways(path: str, server: RunningServer, log: Path) -> None:
    asked = {
        "standard": [{}, {"priority": 0}, {"service_tier": "auto"}, {"service_tier": "default", "priority": 0}],
        "interactive": [{"priority": -1}, {"service_tier": "priority"}, {"service_class": "interactive"}],
        "batch": [{"priority": 7}, {"service_tier": "flex"}, {"service_class": "batch", "service_tier": "flex"}],
    }
    for name, choices in asked.items():
        for fields in choices:
            assert served_class(server, log, path, BODIES[path] | fields) == name, fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"service_class": "urgent"}, "expected one of: interactive, standard, batch"),
        ({"service_class": "batch", "priority": -1}, "give one of them"),
        ({"service_tier": "flex", "priority": -1}, "give one of them"),
        ({"service_tier": "gold"}, "got 'gold' but expected 'auto'"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_what_is_no_class_is_refused(fields: dict[str, Any], message: str, server: RunningServer) -> None:
    for path, body in BODIES.items():
        response = server.post(path, body | fields, headers=as_key("light"))
        assert response.status_code == 400, path
        assert message in response.json()["error"]["message"]


def test_a_tenant_is_served_in_no_more_urgent_class_than_it_may(server: RunningServer, log: Path) -> None:
    body = BODIES["/v1/completions"]
    found = [
        served_class(server, log, "/v1/completions", body | {"priority": priority}, key)
        for key in ("heavy", "patient", "light")
        for priority in (-1, 0, 1)
    ]
    assert found == ["standard", "standard", "batch", "batch", "batch", "batch", "interactive", "standard", "batch"]


def test_a_response_says_which_tier_served_it(server: RunningServer) -> None:
    def tier(key: str, asked: str) -> str:
        body = BODIES["/v1/responses"] | {"service_tier": asked}
        return str(server.post("/v1/responses", body, headers=as_key(key)).json()["service_tier"])

    assert [tier("light", asked) for asked in ("auto", "flex", "priority")] == ["default", "flex", "priority"]
    assert tier("heavy", "priority") == "default"


@pytest.mark.slow
def test_the_order_is_by_class_and_share_and_not_by_arrival(server: RunningServer, log: Path) -> None:
    num_before = len(lines(log))
    threads: list[threading.Thread] = []

    def send(key: str, name: str) -> None:
        """Returns when the engine has the request."""
        body = {"prompt": f"{name} " * 8, "max_tokens": 4, "ignore_eos": True}
        options = {"json": body, "headers": as_key(key), "timeout": 60}
        threads.append(threading.Thread(target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs=options))
        threads[-1].start()
        server.until(lambda: num_open(server, "standard") + num_open(server, "batch") == len(threads))

    holder = {"prompt": "hold", "max_tokens": 200, "n": 100, "ignore_eos": True, "stream": True, "priority": -1}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=holder, headers=as_key("admin"), timeout=60) as held:
        assert held.status_code == 200, held.read()
        events = held.iter_lines()
        next(events)  # it has the only slot, and many choices that go before all but urgent ones
        send("patient", "patient")
        for number in range(4):
            send("heavy", f"heavy{number}")
        for number in range(2):
            send("light", f"light{number}")
        urgent = {"prompt": "urgent", "max_tokens": 4, "priority": -1}
        assert server.post("/v1/completions", urgent, headers=as_key("light")).status_code == 200
        assert len(threads) == num_open(server, "standard") + num_open(server, "batch")
    for thread in threads:
        thread.join()
    server.until(lambda: len(lines(log)) == num_before + 108)
    ended = [(one["key"], one["service_class"]) for one in lines(log)[num_before:] if one["key"] != "admin-1"]
    assert ended[0] == ("light", "interactive")  # it came last, and had its answer while all others waited
    assert ended[-1] == ("patient", "batch")  # it came first
    usual = [key for key, _ in ended[1:-1]]
    assert sorted(usual) == ["heavy"] * 4 + ["light"] * 2
    assert "light" in usual[:2]  # a tenant's first request waits for no second one of another
    assert usual[-1] == "heavy"


def test_figures_by_class_and_tenant(server: RunningServer, log: Path) -> None:
    served_class(server, log, "/v1/completions", BODIES["/v1/completions"] | {"service_tier": "flex"})
    samples = figures(server)
    assert samples["evenflow:class_requests_total", "batch"] >= 1
    assert samples["evenflow:class_ttft_seconds_count", "batch"] >= 1
    assert samples["evenflow:class_open_requests", "batch"] == 0
    assert samples["evenflow:tenant_queue_seconds_total", "light"] > 0


def test_made_up_tenants_do_not_grow_the_figures() -> None:
    counted = TenantFigures({})
    for number in range(3 * MAX_TENANTS):
        counted.count("key-1", f"t{number}", 10, 1, 0.5)
    queued = next(family for family in counted.collect() if family.name == "evenflow:tenant_queue_seconds")
    assert len(queued.samples) == MAX_TENANTS + 1
    assert sum(sample.value for sample in queued.samples) == 1.5 * MAX_TENANTS
