"""`evenflow ab` on the command line."""

from __future__ import annotations

import json
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from evenflow.cli.ab import AbOptions, _goals
from tests.cli.running import command_line, parse_arguments, restore_interrupts, run_cli
from tests.models import tiny_llama

BAD = {
    "the same twice": (["fixed:8", "fixed:8"], "twice"),
    "unknown policy": (["fixed:8", "fastest"], "policy='fastest'"),
    "no side": ([], "'A': A server (http://127.0.0.1:8000) or a policy. Usage: evenflow ab"),
    "one side": (["fixed:8"], "'B': The server or policy to compare with A."),
    "no data there": (["fixed:8", "unchunked", "--data", "/no/such/data"], "'/no/such/data'"),
    "one pair": (["fixed:8", "unchunked", "--pairs", 1], "--pairs"),
    "no duration": (["fixed:8", "unchunked", "--tbt-target", "soon"], "'soon'"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_input(arguments: list[object], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "ab", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys, "ab", "http://127.0.0.1:9", "http://127.0.0.1:10")
    assert (finished.code, finished.out) == (1, "")
    assert "no server at http://127.0.0.1:9 " in finished.err
    assert "start one with `evenflow serve`" in finished.err


def test_two_policies_on_own_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {n} " * 6}) + "\n" for n in range(4)))
    arguments = ["--model", tiny_llama(), "--data", data, "--pairs", 2, "--rate", 0, "--max-tokens", 4]
    page = tmp_path / "ab.html"
    finished = run_cli(capsys, "ab", "fixed:8", "unchunked", *arguments, "--json", "-", "--html", page)
    assert finished.code == 0
    report = json.loads(finished.out)
    assert (report["a"], report["b"], report["requests"], report["num_answers"]) == ("fixed:8", "unchunked", 4, 8)
    assert report["identical_outputs"] is True
    assert {estimate["name"] for estimate in report["estimates"]} >= {"TTFT p50, s", "TBT p99, s", "output tokens/s"}
    assert "All 8 greedy answers are the same on both sides." in finished.err
    assert '"differ" rests on 2 pairs of 4 requests, which is little' in finished.err
    assert "99% of the gaps within 200 ms (the default of --tbt-target)" in finished.err
    assert "99% of the gaps within 200 ms" in page.read_text()
    assert report["complete"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fixed:8", "target:300ms"], "within 300 ms (the target of B; --tbt-target sets another)"),
        (["target:300ms", "target:100ms"], "within 300 ms (the larger target; --tbt-target sets another)"),
        (["fixed:8", "target:300ms", "--tbt-target", "50ms"], "within 50 ms (--tbt-target)"),
        (["http://127.0.0.1:9", "unchunked"], "within 200 ms (the default of --tbt-target)"),
    ],
)
def test_the_gap_limit_is_that_of_a_target(arguments: list[str], expected: str) -> None:
    given = parse_arguments(["ab", *arguments])
    options = AbOptions(**{field.name: given[field.name] for field in fields(AbOptions)})
    assert expected in str(_goals(given["a"], given["b"], options))


def run_interrupted(round_number: int) -> subprocess.CompletedProcess[str]:
    """Three pairs, with an interrupt in this round."""
    interrupt = (
        "import os, signal\n"
        "from evenflow.bench import ab\n"
        "run_round, num_rounds = ab._run_round, 0\n"
        "async def run(endpoint, asks):\n"
        "    global num_rounds\n"
        "    num_rounds += 1\n"
        f"    if num_rounds == {round_number}: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return await run_round(endpoint, asks)\n"
        "ab._run_round = run\n"
    )
    arguments = ["--model", tiny_llama(), "--pairs", 3, "--requests", 2, "--rate", 0, "--max-tokens", 4, "--json", "-"]
    line = command_line(["ab", "fixed:8", "unchunked", *arguments], before=interrupt)
    return subprocess.run(line, capture_output=True, text=True, preexec_fn=restore_interrupts, check=False)


@pytest.mark.slow
def test_an_interrupt_reports_the_complete_pairs() -> None:
    finished = run_interrupted(round_number=6)
    assert finished.returncode == 130, finished.stderr
    report = json.loads(finished.stdout)
    assert (report["pairs"], report["complete"], report["num_answers"]) == (2, False, 4)
    assert "Interrupted after 2 of 3 pairs: the figures are theirs." in finished.stderr
    assert "Stopping after the step that runs now; Ctrl-C again quits at once.\n" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.slow
def test_an_interrupt_before_two_pairs_reports_nothing() -> None:
    finished = run_interrupted(round_number=4)
    assert (finished.returncode, finished.stdout) == (130, "")
    assert finished.stderr == "Stopping after the step that runs now; Ctrl-C again quits at once.\n"
