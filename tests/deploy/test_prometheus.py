"""Prometheus's own tool reads the alerts and what a server reports."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.serving import scripted_server

RULES = Path(__file__).parents[2] / "dashboards" / "alerts.yaml"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool")


def promtool(*arguments: object, given: bytes = b"") -> tuple[int, str]:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *map(str, arguments)], input=given, capture_output=True, check=False)
    return done.returncode, (done.stdout + done.stderr).decode()


def test_the_alerts_are_rules(tmp_path: Path) -> None:
    code, said = promtool("check", "rules", RULES)
    assert code == 0, said
    assert "SUCCESS: 7 rules found" in said
    broken = tmp_path / "broken.yaml"
    broken.write_text(RULES.read_text().replace("[5m]", "[5 minutes]"))
    assert promtool("check", "rules", broken)[0] != 0


def test_a_scrape_is_well_formed() -> None:
    """It lints too, and evenflow keeps vLLM's names: what it says of them is about names alone."""
    with scripted_server(settings={"api_keys": ["a"], "metrics_api_keys": ["m"]}) as server:
        body = {"prompt": "a", "max_tokens": 3, "tenant": 'quoted "name"\n'}
        assert server.post("/v1/completions", body, headers={"Authorization": "Bearer a"}).is_success
        scraped = server.get("/metrics", headers={"Authorization": "Bearer m"}).content
    code, said = promtool("check", "metrics", given=scraped)
    assert code in (0, 3), said  # 3: lint
    assert "error while parsing" not in said
    assert {line.split(" ", 1)[1] for line in said.splitlines() if line} <= {
        "metric names should not contain ':'",
        'counter metrics should have "_total" suffix',
        'non-counter metrics should not have "_total" suffix',
    }
