"""The Grafana dashboard asks for metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.stepping import samples

DASHBOARD = Path(__file__).parents[3] / "dashboards" / "grafana.json"


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def test_every_query_is_answered() -> None:
    known = samples()
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(queries) > 30
    for query in queries:
        names = re.findall(r"\b(?:vllm|evenflow):\w+", query)
        assert names, query
        for name in names:
            assert name in known, f"{name} in {query}"
        for label in re.findall(r"by \((\w+)\)", query):
            assert label in known[names[0]], f"{label} in {query}"


def test_grafana_s_own_types_read_every_field() -> None:
    """Reading drops fields that Grafana's schema does not have, and those of the wrong type."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard").Dashboard
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder").JSONEncoder
    written = json.loads(DASHBOARD.read_text())
    read = json.loads(encoder().encode(dashboard.from_json(json.loads(DASHBOARD.read_text()))))
    assert _kept(written, read) == written


def _kept(written: Any, read: Any) -> Any:
    """The part of `read` that was written: reading adds defaults."""
    if isinstance(written, dict) and isinstance(read, dict):
        return {name: _kept(value, read[name]) for name, value in written.items() if name in read}
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        return [_kept(*pair) for pair in zip(written, read, strict=True)]
    return read


def test_panels_do_not_overlap_and_have_numbers_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(ids) == len(set(ids))
