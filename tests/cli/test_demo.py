"""`evenflow demo` on a tiny model: its tables, its picture, its JSON, and what shares a step."""

from __future__ import annotations

import io
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from evenflow.bench.timeline import StreamTimes, Timeline
from evenflow.cli.demo import live_streams
from tests.cli.running import long_context_llama, run_cli

NAMES = ["large_1", "small_1", "small_2", "small_3", "large_2"]
FIGURES = ["longest pause", "first, small", "mean small", "mean large", "all"]
RATES = ["requests/s", "tokens/s out", "tokens/s all"]


def steps_of(record: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in record.read_text().splitlines()]
    return [event["plan"] for event in events if event.get("event") == "step"]


def test_three_runs_of_the_same_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, plot = tmp_path / "steps.jsonl", tmp_path / "streams.png"
    arguments = ["--record", record, "--plot", plot, "--json", "-"]
    finished = run_cli(capsys, "demo", "async", "--model", long_context_llama(), *arguments)
    assert finished.code == 0, finished.err
    report = json.loads(finished.out)
    figures = report["async"]
    assert report["policy"].startswith("target:")
    policies = {"unchunked": "unchunked", "fixed": "fixed:512", "chunked": report["policy"]}
    assert {name: figures[name]["policy"] for name in policies} == policies
    for name in policies:
        assert [request["name"] for request in figures[name]["requests"]] == NAMES
        gaps = [request["longest_gap_s"] for request in figures[name]["requests"]]
        assert figures[name]["longest_gap_s"] == max(gaps) > 0
    assert [request["num_chunks"] for request in figures["unchunked"]["requests"]] == [1] * 5
    assert figures["fixed"]["requests"][0]["num_chunks"] > 2
    assert figures["same_text"] is True
    said = " ".join(finished.err.split())
    assert figures["gain"] in said
    assert said.endswith(" ".join(figures["verdict"].split()))
    assert f"The target is {report['policy'].removeprefix('target:').removesuffix('ms')} ms" in said
    assert "●" not in said  # no picture, except on a terminal
    assert plot.read_bytes().startswith(b"\x89PNG")

    [stalled] = [p for p in steps_of(record) if "unchunked/large_2" in [c["request_id"] for c in p["chunks"]]]
    assert {f"unchunked/{name}" for name in NAMES[1:4]} <= set(stalled["decodes"]["request_ids"])


def test_a_run_finds_nothing_of_an_earlier_one_in_the_prefix_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "steps.jsonl"
    assert run_cli(capsys, "demo", "--model", long_context_llama(), "--record", record).code == 0
    admissions = [admission for plan in steps_of(record) for admission in plan["admissions"]]
    large = [admission for admission in admissions if admission["num_prompt_tokens"] > 1000]
    assert len(large) == 6
    assert all(admission["num_cached_tokens"] < 100 for admission in large)  # at most the template's words


def test_both_demos_show_their_tables_and_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "--model", long_context_llama(), "--policy", "fixed:128")
    assert (finished.code, finished.err) == (0, "")
    rows = [line.split("│")[1].strip() for line in finished.out.splitlines() if line.startswith("│")]
    names = [name for name, _ in groupby(name for name in rows if name)]
    assert names == [*["question", "list", "paragraph", "page"], *NAMES, *FIGURES, *RATES]
    assert "Total time" in finished.out
    assert "With fixed:128 a small request's first token came after " in finished.out
    assert "The target is" not in finished.out
    for next_step in ("`evenflow serve`", "`evenflow demo --live`", "--engine vllm"):
        assert next_step in finished.out
    pause, cost = finished.out.splitlines()[-2:]
    assert pause.startswith("Longest pause of a stream between two tokens: ")
    assert "s with fixed:128" in pause
    assert cost.startswith("What that cost: all 5 requests took ")


def test_the_simple_demo_alone(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "simple", "--model", long_context_llama(), "--json", "-")
    figures = json.loads(finished.out)
    assert "async" not in figures
    assert figures["simple"]["policy"] == figures["policy"]
    sizes = [request["prompt_tokens"] for request in figures["simple"]["requests"]]
    assert len(sizes) == 4
    assert max(sizes) > 5 * min(sizes)
    assert all(request["output_tokens"] >= 1 for request in figures["simple"]["requests"])


def test_a_plot_needs_the_async_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "demo", "simple", "--plot", tmp_path / "streams.png")
    assert (finished.code, finished.out) == (2, "")
    assert "--plot" in finished.err


@pytest.mark.parametrize(("target", "has_picture"), [(None, True), ("-", False)])
def test_a_terminal_shows_the_streams_unless_json_is_printed(
    target: str | None, has_picture: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = io.StringIO()
    terminal = Console(file=written, force_terminal=True, color_system=None, width=100, height=40)
    monkeypatch.setattr("evenflow.cli.demo.text_console", lambda json_target: terminal)
    arguments = ["--json", target] if target else []
    finished = run_cli(capsys, "demo", "async", "--model", long_context_llama(), "--policy", "fixed:400", *arguments)
    assert finished.code == 0, finished.err
    rows = [line for line in written.getvalue().splitlines() if "●" in line and line.startswith(tuple(NAMES))]
    assert bool(rows) is has_picture
    if has_picture:  # at the end: the five streams of both runs
        assert [row.split()[0] for row in rows[-10:]] == NAMES * 2
    assert "Longest pause of a stream" in written.getvalue()


@pytest.mark.parametrize(("encoding", "row"), [("utf-8", "chat ▒●●   ●"), ("ascii", "chat #oo   o")])
def test_the_picture_stays_on_the_terminal(encoding: str, row: str) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding)
    console = Console(file=stream, force_terminal=True, color_system=None, width=60, height=20)
    chat = StreamTimes("chat", 0.0, [(0.0, 0.01)], [0.01, 0.02, 0.06], is_finished=True)
    with live_streams(console, clock=lambda: 0.0) as show:
        show(Timeline("unchunked", 0.0, {"a": chat}))
    stream.flush()
    lines = [line.rstrip() for line in written.getvalue().decode(encoding).splitlines()]
    assert row in lines
    assert "unchunked: longest gap 0.04 s, 0.1 s in all" in lines
