"""`evenflow explain` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenflow.advisor.folk_rules import FOLK_RULES
from tests.cli.running import run_cli, run_process

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "tests" / "advisor" / "logs"
LOG = LOGS / "vllm-0.32-cpu-default.log"


def test_facts_meaning_advice_and_rules(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "explain", LOG)
    assert finished.code == 0
    places = [finished.out.index(f"{part}\n") for part in ("Advice", "Meaning", "Facts", "Rules of thumb")]
    assert places == sorted(places)
    assert "chunk budget 2,048" in finished.out
    assert "last prefix hit rate 47.8%" in finished.out
    assert "--scheduler-cls evenflow.vllm.LatencyTargetScheduler" in finished.out


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_each_log_is_explained(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run_cli(capsys, "explain", path, "--json", "-").out)
    assert report.keys() == {"facts", "meaning", "advice", "rules"}
    assert all(fact["line_number"] >= 1 and fact["line"] for fact in report["facts"])


@pytest.mark.slow
def test_a_stream_is_read_like_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run_cli(capsys, "explain", LOG, "--json", "-").out)
    streamed = run_process("explain", "-", "--json", "-", stdin=LOG.read_bytes())
    assert json.loads(streamed.out) == report


def test_a_block_pasted_from_a_document() -> None:
    block = (
        b"```\nEngine 000:\n- Avg prompt throughput: 1234.5 tokens/s\n- Avg generation throughput: 88 tokens/s\n"
        b"- Running: 12 reqs\n- KV cache usage: 1.6%\n```\n"
    )
    finished = run_process("explain", "-", stdin=block)
    assert finished.code == 0, finished.err
    assert "12 requests were running; the server generated 88.0 tokens per second, 7.3 for each" in finished.out
    assert "1.6%: 50 to 100 times more requests fit. Wrong." in " ".join(finished.out.split())


def test_one_request_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log").write_text("Running: 1 reqs\nAvg generation throughput: 10.0417 tokens/s\n")
    finished = run_cli(capsys, "explain", tmp_path / "log")
    assert "At the peak, 1 request was running; the server generated 10.0 tokens per second" in finished.out
    assert "tokens per s of each request 10.0\n" in finished.out.replace(";", "\n")
    assert "10.04" not in finished.out.partition("Meaning")[0].replace("10.0417 tokens/s", "")


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "docs/faults.md", "docs/server.md", "docs/memory.md"])
def test_a_page_is_no_log(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "explain", ROOT / page)
    assert (finished.code, finished.out) == (2, "")
    assert "no line in it is one that vLLM, SGLang or evenflow writes" in finished.err


def test_without_a_log_each_engine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "explain")
    assert finished.code == 2
    assert "A log of vLLM 0.10 to 0.32, SGLang 0.5 or evenflow; - for standard input." in finished.err


def test_all_rules_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    some = json.loads(run_cli(capsys, "explain", LOG, "--json", "-").out)["rules"]
    every = json.loads(run_cli(capsys, "explain", LOG, "--all-rules", "--json", "-").out)["rules"]
    assert 0 < len(some) < len(every) == len(FOLK_RULES)
    assert all(rule["verdict"] and rule["truth"] for rule in every)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"hello\nworld\n", "no line in it"),
        (b"", "no line in it"),
        (b"\x00\xff" * 9, "no line in it"),
        (None, "No such file"),
    ],
)
def test_a_log_that_is_none(
    content: bytes | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "server.log"
    if content is not None:
        path.write_bytes(content)
    finished = run_cli(capsys, "explain", path)
    assert (finished.code, finished.out) == (2, "")
    assert str(path) in finished.err
    assert named in finished.err
    assert finished.err.count("\n") == 1
