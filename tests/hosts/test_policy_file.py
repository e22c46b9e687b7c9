"""Another target, or none, reaches a host engine through a file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evenflow.core.policies import PolicySpec
from evenflow.hosts.policy_file import PolicyFile

STARTED_WITH = PolicySpec.parse("target:50ms")


def test_a_policy_is_read_when_it_changes_and_bad_ones_are_ignored(tmp_path: Path) -> None:
    writer = PolicyFile(tmp_path / "target")
    reader = PolicyFile(tmp_path / "target")
    assert reader.read_if_changed(STARTED_WITH) is STARTED_WITH
    writer.write(PolicySpec.parse("target:80ms"))
    current = reader.read_if_changed(STARTED_WITH)
    assert str(current) == "target:80ms"
    assert reader.read_if_changed(current) is current
    for bad in ("fixed:64", "target:soon", ""):
        (tmp_path / "target").write_text(bad)
        assert reader.read_if_changed(current) is current
    writer.write(PolicySpec.parse("target:90.5ms,paced"))
    assert str(reader.read_if_changed(current)) == "target:90.5ms,paced"
    writer.write(None)
    assert reader.read_if_changed(current) is None
    writer.write(PolicySpec.parse("fixed:512"))  # which the host does by itself
    assert (tmp_path / "target").read_text() == "none"


def test_a_file_that_cannot_be_looked_at_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, it was a line before each step of the host: a hundred a second."""
    reader = PolicyFile(tmp_path / "target")

    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as while_refused:
        while_refused.setattr(os, "stat", refuse)
        for _ in range(100):
            assert reader.read_if_changed(STARTED_WITH) is STARTED_WITH
    assert len(caplog.records) == 1
    PolicyFile(tmp_path / "target").write(PolicySpec.parse("target:80ms"))
    assert str(reader.read_if_changed(STARTED_WITH)) == "target:80ms"
