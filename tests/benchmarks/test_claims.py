"""docs/claims.md is what the recorded runs say, and a verdict follows the figures."""

from __future__ import annotations

from typing import Any

import pytest
from claims import KNOWN_TO_BE_WRONG, UNMEASURED, Claim
from write_page import PAGE, page, recorded_runs

_CLAIMS = {claim.text: claim for claim in (*KNOWN_TO_BE_WRONG, *UNMEASURED)}


def verdict(claim: Claim, figures: dict[str, Any]) -> str:
    finding = claim.judge(figures)
    assert finding is not None
    return claim.verdict([finding])


def test_the_page_is_what_the_runs_say() -> None:
    assert PAGE.read_text() == page(recorded_runs())


@pytest.mark.parametrize("text", _CLAIMS)
def test_every_claim_was_tested_on_a_cpu(text: str) -> None:
    claim = _CLAIMS[text]
    assert claim.judge(recorded_runs()["cpu"]["experiments"][claim.experiment]) is not None


def test_verdicts_follow_the_figures() -> None:
    same_time = _CLAIMS["All chunks take the same time"]
    for last, expected in ((0.1, "holds"), (0.2, "does not hold")):
        chunks = [{"context": 0, "seconds": 0.1}, {"context": 4096, "seconds": last}]
        assert verdict(same_time, {"chunk": 512, "chunks": chunks}) == expected
    doubles = _CLAIMS["Data parallel doubles throughput"]
    assert verdict(doubles, {"engines": {"1": 10.0, "2": 19.5}}) == "holds"
    assert verdict(doubles, {"engines": {"1": 10.0, "2": 13.0}}) == "does not hold"


def test_memory_is_judged_by_the_better_attention() -> None:
    claim = _CLAIMS["Memory saved: 94 / 98 / 99% at 2,156 / 4,000 / 8,000 tokens"]
    for eager, expected in ((5.0, "holds"), (30.0, "does not hold")):
        rows = [
            {"tokens": tokens, "attention": attention, "run": run, "peak_mb": peak}
            for tokens in (2156, 4000, 8000)
            for attention, chunked in (("eager", eager), ("sdpa", 50.0))
            for run, peak in (("whole", 100.0), ("chunked", chunked))
        ]
        assert verdict(claim, {"rows": rows}) == expected


def test_machines_that_disagree_are_both_heard() -> None:
    claim = _CLAIMS["Data parallel doubles throughput"]
    findings = [claim.judge({"engines": {"1": 1.0, "2": two}}) for two in (1.0, 2.0)]
    assert claim.verdict(finding for finding in findings if finding) == "depends on the machine"
