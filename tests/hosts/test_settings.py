"""Which target a host engine starts with, by its own configuration or the environment."""

from __future__ import annotations

import pytest

from evenflow.errors import InvalidConfig
from evenflow.hosts.settings import TARGET_VARIABLE, read_settings


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
