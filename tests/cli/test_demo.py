"""`evenflow demo` on a tiny model: its tables, its JSON, and the order in which requests finish, in steps."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from evenflow.bench.demo import DEMO_POLICY
from tests.cli.running import long_context_llama, run_cli

NAMES = ["large_1", "small_1", "small_2", "small_3", "large_2"]


def last_step_of_each(recording: list[dict[str, Any]]) -> dict[str, int]:
    """The last step that each request was part of, in the order of arrival."""
    last = {event["request"]["id"]: -1 for event in recording if event.get("event") == "add"}
    for event in recording:
        if event.get("event") == "step":
            plan = event["plan"]
            for request_id in plan["decodes"]["request_ids"] + [chunk["request_id"] for chunk in plan["chunks"]]:
                last[request_id] = plan["step_id"]
    return last


def first_token_step_of_each(recording: list[dict[str, Any]]) -> dict[str, int]:
    return {
        chunk["request_id"]: event["plan"]["step_id"]
        for event in recording
        if event.get("event") == "step"
        for chunk in event["plan"]["chunks"]
        if chunk["samples"]
    }


@pytest.mark.parametrize("policy", [None, "fixed:128"])
def test_small_requests_end_before_the_large_one_ahead_of_them_only_with_chunking(
    policy: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "steps.jsonl"
    arguments = ["--policy", policy] if policy else []
    finished = run_cli(
        capsys, "demo", "async", "--model", long_context_llama(), "--record", record, "--json", "-", *arguments
    )
    assert finished.code == 0, finished.err
    figures = json.loads(finished.out)["async"]
    assert figures["chunked"]["policy"] == (policy or DEMO_POLICY)
    assert figures["unchunked"]["policy"] == "unchunked"
    assert figures["same_text"] is True
    assert figures["verdict"] in " ".join(finished.err.split())
    for run in ("chunked", "unchunked"):
        assert [request["name"] for request in figures[run]["requests"]] == NAMES

    recording = [json.loads(line) for line in record.read_text().splitlines()]
    last, first_token = last_step_of_each(recording), first_token_step_of_each(recording)
    chunked, unchunked = list(last)[:5], list(last)[5:]
    assert max(last[small] for small in chunked[1:4]) < min(last[large] for large in (chunked[0], chunked[4]))
    assert all(first_token[small] >= first_token[unchunked[0]] for small in unchunked[1:4])
    assert [request["num_chunks"] for request in figures["unchunked"]["requests"]] == [1] * 5
    places = [request["finish_place"] for request in figures["chunked"]["requests"]]
    assert set(places[1:4]) == {1, 2, 3}


def test_the_second_run_finds_nothing_of_the_first_in_the_prefix_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "steps.jsonl"
    assert run_cli(capsys, "demo", "async", "--model", long_context_llama(), "--record", record).code == 0
    events = [json.loads(line) for line in record.read_text().splitlines()]
    admissions = [a for e in events if e.get("event") == "step" for a in e["plan"]["admissions"]]
    large = [admission for admission in admissions if admission["num_prompt_tokens"] > 1000]
    assert len(large) == 4
    assert all(admission["num_cached_tokens"] < 100 for admission in large)  # at most the template's words


def test_both_demos_show_their_tables(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "--model", long_context_llama())
    assert (finished.code, finished.err) == (0, "")
    rows = [line.split("│")[1].strip() for line in finished.out.splitlines() if line.startswith("│")]
    names = [name for name, _ in groupby(name for name in rows if name)]
    assert names == [
        *["question", "list", "paragraph", "page"],
        *NAMES,
        *["mean small", "mean large", "all", "tokens/s out", "tokens/s all"],
    ]
    assert "Total time" in finished.out
    assert "With chunking a small request took" in finished.out


def test_the_simple_demo_alone(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "simple", "--model", long_context_llama(), "--json", "-")
    figures = json.loads(finished.out)
    assert "async" not in figures
    sizes = [request["prompt_tokens"] for request in figures["simple"]["requests"]]
    assert len(sizes) == 4
    assert max(sizes) > 5 * min(sizes)
    assert all(request["output_tokens"] >= 1 for request in figures["simple"]["requests"])


def test_the_help_names_the_policy_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert f"({DEMO_POLICY} unless" in " ".join(run_cli(capsys, "demo", "--help").out.split())
