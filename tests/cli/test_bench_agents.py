"""`evenflow bench agents` on a tiny model, over HTTP, and with a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow.executors.recorded import replay
from tests.cli.running import run_cli
from tests.models import tiny_llama

QUICK = ["--agents", 2, "--think", "10ms", "--misses", 2, "--miss-pause", "20ms", "--repeat", 1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the step times of this busy test run out of the user's cache."""
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))


def test_policies_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "steps.jsonl"
    arguments = ["--model", tiny_llama(), *QUICK, "--json", "-", "--record", steps]
    finished = run_cli(capsys, "bench", "agents", "fixed:64", "target:200ms", *arguments)
    assert finished.code == 0, finished.err
    report = json.loads(finished.out)
    assert [side["name"] for side in report["sides"]] == ["fixed:64", "target:200ms"]
    assert report["load"]["num_agents"] == 2
    assert report["load"]["miss_tokens"] == int(50_000 * report["load"]["scale"])
    for side in report["sides"]:
        assert side["miss_ttft_s"]["count"] == 2
        assert side["errors"] == []
        assert 0 < side["cached_share"] < side["cached_turn_share"] < 1
    assert set(report["sides"][0]["ratios"].values()) <= {1.0, None}
    assert "beside misses of" in finished.err
    # A miss is one: the engine found nothing of it in its cache.
    admissions = [admission for plan in replay(steps) for admission in plan.admissions]
    misses = [one for one in admissions if one.num_prompt_tokens == report["load"]["miss_tokens"]]
    assert [one.num_cached_tokens for one in misses] == [0] * 4


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lengths = {"input_length": 1500, "output_length": 40}
    blocks = ([1, 2, 3], [1, 2, 4], [5, 6, 7])
    path.write_text(
        "".join(json.dumps({"timestamp": 50 * n, "hash_ids": ids, **lengths}) + "\n" for n, ids in enumerate(blocks))
    )
    arguments = ["--model", tiny_llama(), "--trace", path, "--miss-tokens", 1000, "--repeat", 1, "--json", "-"]
    finished = run_cli(capsys, "bench", "agents", "fixed:64", *arguments)
    assert finished.code == 0, finished.err
    [side] = json.loads(finished.out)["sides"]
    assert (side["turn_ttft_s"]["count"], side["miss_ttft_s"]["count"]) == (1, 2)
    assert side["cached_turn_share"] > 0.5
    assert "3 requests of trace.jsonl at 1x speed" in finished.err


BAD = {
    "unknown policy": (["fastest"], "policy='fastest'"),
    "the same twice": (["fixed:8", "fixed:8"], "'fixed:8' twice"),
    "no trace there": (["--trace", "/no/such/trace"], "'/no/such/trace'"),
    "no speed": (["--speed", 0], "--speed"),
    "speed of no trace": (["--speed", 2], "--speed without --trace"),
    "agents beside a trace": (["--trace", "/no/such/trace", "--agents", 3], "--agents with --trace"),
    "too long": (["--model", tiny_llama, "--scale", 1], "lower the scale"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_input(arguments: list[object], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "bench", "agents", *(one() if callable(one) else one for one in arguments))
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "bench", "agents", "http://127.0.0.1:9")
    assert (finished.code, finished.out) == (1, "")
    assert "no server at http://127.0.0.1:9 " in finished.err
