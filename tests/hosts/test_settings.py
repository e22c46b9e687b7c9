"""Which target a host engine starts with, by its own configuration or the environment."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest

from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.errors import InvalidConfig, InvalidInput
from evenflow.hosts.settings import SHARES_VARIABLE, TARGET_VARIABLE, RequestSettings, check_setting, read_settings


@pytest.mark.parametrize(
    ("given", "policy"),
    [("50ms", "target:50ms"), (0.05, "target:50ms"), ("20ms,paced", "target:20ms,paced"), ("none", "None")],
)
def test_targets(given: object, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET_VARIABLE, raising=False)
    assert str(read_settings({"evenflow": {"tbt_target": given}}).policy) == policy
    if isinstance(given, str):
        monkeypatch.setenv(TARGET_VARIABLE, given)
        assert str(read_settings(None).policy) == policy


@pytest.mark.parametrize("given", ["soon", "fixed:512", "", "50", "50,paced", "50ms,", "50ms,strict", 50, True, {}])
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


@pytest.fixture
def settings() -> RequestSettings:
    return RequestSettings(DEFAULT_CLASSES, logging.getLogger("vllm.evenflow"))


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
def test_the_class_of_a_request(
    settings: RequestSettings, given: dict[str, object] | None, priority: int, expected: str
) -> None:
    assert settings.read(given, priority)["service_class"] == expected


def test_the_targets_of_a_request(settings: RequestSettings) -> None:
    found = settings.read({"tbt_target": "50ms", "ttft_target": "20s", "tenant": "acme", "service_class": "batch"})
    assert found == {"tbt_target": 0.05, "ttft_target": 20.0, "tenant": "acme", "service_class": "batch"}
    assert settings.read({"tbt_target": 0.05, "ttft_target": 2}) == {
        "tbt_target": 0.05,
        "ttft_target": 2.0,
        "service_class": "standard",
    }
    assert settings.read(None) == settings.read({}) == settings.read({"tbt_target": None})


SENSELESS: list[tuple[str, object]] = [
    *(("tbt_target", value) for value in ("soon", "50", True, 0, -1, 50, math.nan, math.inf, 10**400, "3601s", [1])),
    *(("ttft_target", value) for value in ("soon", True, 0, -1, 20, math.nan, math.inf, 10**400, 3601, {})),
    *(("service_class", value) for value in ("fast", 5, ["batch"])),
    *(("tenant", value) for value in ("x" * 65, 5, ["acme"])),
]


@pytest.mark.parametrize(("name", "value"), SENSELESS)
def test_what_a_request_cannot_mean_is_ignored_and_logged_once(
    settings: RequestSettings, caplog: pytest.LogCaptureFixture, name: str, value: object
) -> None:
    for _ in range(3):
        assert settings.read({name: value, "ttft_target" if name == "tbt_target" else "tbt_target": 2}).get(name) in (
            None,
            "standard",
        )
    [message] = caplog.messages
    assert message.startswith(f"evenflow: a request's {name} is ignored")
    assert len(message) < 300
    with pytest.raises(InvalidInput):
        check_setting(name, value, DEFAULT_CLASSES)


@pytest.mark.parametrize("given", ["tbt_target", ["tbt_target"], 5])
def test_settings_that_are_no_object_are_ignored(
    settings: RequestSettings, caplog: pytest.LogCaptureFixture, given: object
) -> None:
    assert settings.read(given) == {"service_class": "standard"}
    assert len(caplog.messages) == 1
