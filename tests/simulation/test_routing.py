"""Which replica gets a request."""

from __future__ import annotations

from collections import Counter

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.errors import InvalidInput
from evenflow.simulation.cluster import Cluster, Setup, _Node
from evenflow.simulation.load import Load, LoadRequest
from evenflow.simulation.routing import router_of
from tests.simulation.test_fast_forward import step_times


def served_by(router: str, requests: list[LoadRequest], monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The replica of each request."""
    found: dict[str, int] = {}
    take_in = _Node.take_in

    def spy(node: _Node, one: LoadRequest, *arguments: object) -> None:
        found[one.id] = node._number
        take_in(node, one, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_Node, "take_in", spy)
    setup = Setup(
        step_times=step_times(1), policy=PolicySpec.parse("fixed:256"), num_blocks=500, num_replicas=3, router=router
    )
    Cluster(Load("test", requests), setup, 0).run()
    assert len(found) == len(requests)
    return found


def requests(count: int, **settings: str) -> list[LoadRequest]:
    return [LoadRequest(f"r{n}", ((n + 2, 50),), 5, 0.5 * n, **settings) for n in range(count)]  # type: ignore[arg-type]


def test_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(served_by("round-robin", requests(6), monkeypatch).values()) == [0, 1, 2, 0, 1, 2]


def test_the_least_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = LoadRequest("long", ((2, 50),), 1000, 0.0)
    found = served_by("least-loaded", [long, *requests(5)[1:]], monkeypatch)
    assert found["long"] == 0
    assert 0 not in [replica for name, replica in found.items() if name != "long"]


def test_the_one_with_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [LoadRequest(f"r{n}", ((2 + n % 2, 64), (100 + n, 20)), 3, 0.5 * n) for n in range(8)]
    several[0] = LoadRequest("long", ((2, 64),), 2000, 0.0)  # so that the next goes elsewhere
    found = served_by("prefix", several, monkeypatch)
    assert {found[name] for name in ("r2", "r4", "r6")} == {found["long"]}
    assert {found[name] for name in ("r3", "r5", "r7")} == {found["r1"]}
    assert found["r1"] != found["long"]


def test_a_tenant_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [LoadRequest(f"r{n}", ((n + 2, 50),), 5, 0.5 * n, tenant=f"t{n % 7}") for n in range(21)]
    found = served_by("tenant", several, monkeypatch)
    replicas = {tenant: {found[f"r{n}"] for n in range(21) if n % 7 == tenant} for tenant in range(7)}
    assert all(len(of_tenant) == 1 for of_tenant in replicas.values())
    assert len(Counter(found.values())) > 1


def test_an_unknown_router() -> None:
    with pytest.raises(InvalidInput, match="round-robin, least-loaded, prefix, tenant"):
        router_of("random")
