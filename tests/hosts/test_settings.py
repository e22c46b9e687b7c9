"""Which target a host engine starts with, by its own configuration or the environment."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.errors import InvalidConfig
from evenflow.hosts.settings import SHARES_VARIABLE, TARGET_VARIABLE, own_class, own_target, own_tenant, read_settings


@pytest.mark.parametrize(
    ("given", "policy"),
    [("50ms", "target:50ms"), (0.05, "target:50ms"), ("20,paced", "target:20,paced"), ("none", "None")],
)
def test_targets(given: object, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    assert str(read_settings({"evenflow": {"tbt_target": given}}).policy) == policy
    if isinstance(given, str):
        monkeypatch.setenv(TARGET_VARIABLE, given)
        assert str(read_settings(None).policy) == policy


@pytest.mark.parametrize("given", ["soon", "fixed:512", "", True, {}])
def test_what_is_no_target(given: object) -> None:
    with pytest.raises(InvalidConfig, match="Got tbt_target="):
        read_settings({"evenflow": {"tbt_target": given}})


def test_no_target_must_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    with pytest.raises(InvalidConfig, match="with 'none' steps are only reported"):
        read_settings({})


def test_shares_come_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "shares.toml"
    path.write_text("[classes.fast]\nrank = -5\nshare = 0.5\n\n[tenants.acme]\nweight = 3\n")
    found = read_settings({"evenflow": {"tbt_target": "50ms", "shares": str(path)}})
    assert ([one.name for one in found.classes], found.tenant_weights) == (["fast"], {"acme": 3})
    monkeypatch.setenv(SHARES_VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(InvalidConfig, match="cannot be read"):
        read_settings({"evenflow": {"tbt_target": "50ms"}})
    monkeypatch.delenv(SHARES_VARIABLE)
    assert read_settings({"evenflow": {"tbt_target": "50ms"}}).classes == DEFAULT_CLASSES


@pytest.mark.parametrize(
    ("given", "priority", "expected"),
    [
        ({"service_class": "batch"}, 0, "batch"),
        ({"service_class": "batch"}, -1, "batch"),
        ({"service_class": "fast"}, 0, "standard"),
        ({"service_class": ["batch"]}, 4, "batch"),
        (None, -2, "interactive"),
    ],
)
def test_the_class_of_a_request(given: dict[str, object] | None, priority: int, expected: str) -> None:
    assert own_class(given, priority, DEFAULT_CLASSES) == expected


def test_the_target_of_a_request() -> None:
    assert own_target({"tbt_target": 0.05}) == 0.05
    assert own_target({"ttft_target": 2}, "ttft_target") == 2.0
    for senseless in ("50ms", True, 0, -1, math.nan, math.inf, 10**400, 3601):
        assert own_target({"tbt_target": senseless}) is None
    assert own_target(None) is None


def test_the_tenant_of_a_request() -> None:
    assert own_tenant({"tenant": "acme"}) == "acme"
    assert own_tenant({"tenant": "x" * 1000}) == "x" * 64
    assert own_tenant({"tenant": 5}) == own_tenant(None) == ""
