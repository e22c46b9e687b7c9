"""`evenflow simulate`: tables, JSON, pictures, and one clear line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow.core.policies import policy_kinds
from tests.cli.running import run_cli

DEVICE = ("--device", "h200-llama-8b-vllm", "--kv-tokens", 200_000, "--runs", 2)
DRAWN = ("--rate", 8, "--prompt-tokens", "600:0.8", "--output-tokens", "40", "--requests", 12)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:{n:02}.0000000,{200 + 40 * n},{10 + n}" for n in range(12)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows, "2023-11-16 18:15:59.0000000,10,0"]))
    return path


def test_a_trace_under_two_policies(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--tbt-target", "50ms", "--ttft-target", "2s", "--speed", 4, "--json", "-")
    finished = run_cli(capsys, "simulate", trace, *DEVICE, *options)
    assert finished.code == 0, finished.err
    report = json.loads(finished.out)
    assert [one["policy"] for one in report["forecasts"]] == ["vllm:8192", "target:50ms"]
    assert report["load"]["requests"] == 12
    assert report["load"]["seconds"] == pytest.approx(11 / 4)
    assert report["load"]["left_out"] == {"an answer of 0 tokens": 1}
    for one in report["forecasts"]:
        assert one["num_done"] == 24
        p99 = one["percentiles"]["gap"]["p99"]
        assert 0.004 < p99["low"] <= p99["value"] <= p99["high"] < 0.2
        assert one["good_share"]["value"] == 1.0
    assert "left out: 1 x an answer of 0 tokens" in finished.err
    assert "gap between tokens, ms: p99" in finished.err


def test_drawn_and_fitted_loads(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "simulate", *DRAWN, *DEVICE, "--json", "-")
    assert finished.code == 0, finished.err
    assert json.loads(finished.out)["forecasts"][0]["num_requests"] == 24
    finished = run_cli(
        capsys, "simulate", "--fit", trace, *DEVICE, "--replicas", 2, "--router", "prefix", "--json", "-"
    )
    assert finished.code == 0, finished.err
    report = json.loads(finished.out)
    assert (report["load"]["name"], report["replicas"]) == ("like trace.csv", 2)


def test_a_sample_says_how_far_it_may_be_off(capsys: pytest.CaptureFixture[str]) -> None:
    sample = ("--replicas", 12, "--sample", 4, "--policy", "vllm:8192")
    finished = run_cli(capsys, "simulate", *DRAWN[:-1], 60, *DEVICE, *sample)
    assert finished.code == 0, finished.err
    assert "vllm:8192: 4 of 12 replicas were simulated." in finished.out
    assert "p99 gap between tokens " in finished.out


def test_the_same_seed_gives_the_same_report(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = (
        run_cli(capsys, "simulate", *DRAWN, *DEVICE, "--seed", seed, "--json", "-").out for seed in (1, 1, 2)
    )
    assert first == second
    assert json.loads(first) != json.loads(other)


def test_an_estimate_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "simulate", *DRAWN, "--device", "L4", "--kv-tokens", 60_000, "--runs", 1)
    assert finished.code == 0, finished.err
    assert "ESTIMATE" in finished.out


def test_beyond_the_recorded_shapes_nothing_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--rate", 1, "--prompt-tokens", 100_000, "--output-tokens", 4, "--requests", 2)
    finished = run_cli(capsys, "simulate", *long, *DEVICE)
    assert finished.code == 0, finished.err
    assert "unknown, because" in finished.out
    assert "prompts of more than" in finished.out


def test_pictures(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    curve, timeline = tmp_path / "curve.png", tmp_path / "timeline.png"
    pictures = ("--plot", curve, "--timeline", timeline, "--tbt-target", "50ms")
    finished = run_cli(capsys, "simulate", trace, *DEVICE, *pictures)
    assert finished.code == 0, finished.err
    assert curve.read_bytes()[:4] == timeline.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.csv", *DEVICE), "no such file"),
        (("EMPTY", *DEVICE), "it is empty"),
        (("COLUMNS", *DEVICE), "no field such as"),
        (("TRACE", "--device", "TPU", "--kv-tokens", 1000), "'TPU' but it is unknown"),
        (("TRACE", "--device", "h200-llama-8b-vllm"), "--kv-tokens"),
        (("TRACE", *DEVICE, "--model", "default"), "--model with --device"),
        (("TRACE", *DEVICE, "--policy", "vllm"), "expected a whole number"),
        (("TRACE", *DEVICE, "--policy", "best"), "expected one of"),
        (("TRACE", *DEVICE, "--policy", "vllm:512,vllm:512"), "each policy once"),
        (("TRACE", *DEVICE, "--policy", "prefill-share:140"), "from 1 to 100"),
        (("TRACE", *DEVICE, "--policy", "vllm-interval:0"), "whole number >= 1"),
        (("TRACE", *DEVICE, "--sample", 4), "only 1 replica"),
        (("TRACE", *DEVICE, "--router", "random"), "round-robin"),
        (("TRACE", "--fit", "TRACE", *DEVICE), "a trace and --fit"),
        (("TRACE", *DEVICE, "--prompt-tokens", "5"), "--prompt-tokens with a trace"),
        (DEVICE, "Got no trace"),
        ((*DRAWN[:-2], "--prompt-tokens", "many", *DEVICE), "expected a median"),
        (("TRACE", *DEVICE, "--runs", 0), "--runs"),
        (("TRACE", *DEVICE, "--rate", "nan"), "--rate"),
        (("TRACE",), "--device"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[object, ...], message: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"TRACE": trace, "EMPTY": tmp_path / "empty.csv", "COLUMNS": tmp_path / "columns.csv"}
    files["EMPTY"].write_text("")
    files["COLUMNS"].write_text("a,b\n1,2\n")
    finished = run_cli(capsys, "simulate", *(files.get(str(one), one) for one in arguments))
    assert finished.code == 2
    assert finished.out == ""
    [line] = finished.err.splitlines()
    assert message in line


def test_the_rules_of_others_are_the_simulators_alone(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = list(policy_kinds())
    assert run_cli(capsys, "simulate", trace, *DEVICE, "--policy", "sglang:2048").code == 0
    assert list(policy_kinds()) == before
    assert run_cli(capsys, "serve", "--policy", "sglang:2048").code == 2
