"""Writes docs/claims.md from the recorded runs: `make claims`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claims import KNOWN_TO_BE_WRONG, UNMEASURED, Claim

_FOLDER = Path(__file__).parent
PAGE = _FOLDER.parents[1] / "docs" / "claims.md"
RUNS = {"cpu": "CPU", "h200": "H200"}  # file and heading of a column
_HEAD = """# What is said about chunked prefill, tested

Written by `make claims` from the figures in `benchmarks/claims/runs`; do not edit. `python benchmarks/claims/measure.py
--run NAME [EXPERIMENT ...]` measures on your machine. `benchmarks/claims/claims.py` computes the verdicts from them.

"""


def page(runs: Mapping[str, Mapping[str, Any]]) -> str:
    machines = "".join(f"- {RUNS[name]}: {run['machine']}\n" for name, run in runs.items())
    sections = [("Known to be wrong", KNOWN_TO_BE_WRONG), ("Not measured where they were made", UNMEASURED)]
    return _HEAD + machines + "".join(_section(title, claims, runs) for title, claims in sections)


def _section(title: str, claims: Sequence[Claim], runs: Mapping[str, Mapping[str, Any]]) -> str:
    columns = "".join(f" {RUNS[name]} |" for name in runs)
    lines = [f"\n## {title}\n", f"| claim | experiment |{columns} verdict |", "|---" * (3 + len(runs)) + "|"]
    for claim in claims:
        experiments = {name: run["experiments"].get(claim.experiment) for name, run in runs.items()}
        found = {name: claim.judge(figures) for name, figures in experiments.items() if figures}
        findings = {name: finding for name, finding in found.items() if finding is not None}
        cells = "".join(f" {findings[name].text if name in findings else 'not measured'} |" for name in runs)
        verdict = claim.verdict(findings.values())
        lines.append(f"| {claim.text} | `{claim.experiment}` |{cells} **{verdict}**. {claim.because} |")
    return "\n".join(lines) + "\n"


def recorded_runs() -> dict[str, dict[str, Any]]:
    paths = {name: _FOLDER / "runs" / f"{name}.json" for name in RUNS}
    return {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}


if __name__ == "__main__":
    PAGE.write_text(page(recorded_runs()))
