"""`evenflow bench stall` on a tiny model, and durations as options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evenflow.cli.bench_stall import _cause_text
from evenflow.cli.main import main
from evenflow.core.report import Cause, CauseKind
from tests.cli.running import command_line, long_context_llama, restore_interrupts
from tests.models import tiny_llama

SMALL = ["--chats", "2", "--chat-tokens", "10", "--long-prompts", "4", "--long-tokens", "60", "--threads", "1"]
FIGURES = {
    "policy",
    "feasible",
    "steps",
    "tbt_p50_s",
    "tbt_p90_s",
    "tbt_p99_s",
    "tbt_max_s",
    "late_share",
    "long_ttft_p50_s",
    "prefill_tokens_per_s",
    "total_s",
    "output_tokens_per_s",
    "step_time_mape",
    "identical_outputs",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the step times of this busy test run out of the user's cache."""
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))


def stall(*arguments: str) -> int:
    return main(["bench", "stall", "--model", str(tiny_llama()), *SMALL, *arguments])


@pytest.mark.slow
def test_policies_are_compared_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["unchunked", "fixed:16", "target:200ms,paced", "target:1000ms"]
    code = stall(
        *("--policies", ",".join(names), "--repeat", "2", "--quick", "--explain", "--json", "-"),
        *("--interval", "50ms", "--plot", str(tmp_path / "stall.png"), "--curve", str(tmp_path / "curve.png")),
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads(out)
    assert [run["policy"] for run in report["runs"]] == names
    assert all(run.keys() >= FIGURES for run in report["runs"])
    assert all(run["identical_outputs"] for run in report["runs"])
    assert (report["long_prompts"], report["long_tokens"], report["interval_s"]) == (4, 60, 0.05)
    assert report["complete"]
    assert report["feasible_target_s"] > 0
    assert err.index("Measuring steps") < err.index("Lowest feasible target: ") < err.index("unchunked")
    assert "Policies: 4, with 2 x 4 prompts of 60 tokens under each. This takes about " in err
    for name in names:
        assert f"The longest gaps under {name}:" in err
    for name in ("stall.png", "curve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_an_interval_one_is_chosen_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert stall("--policies", "fixed:16", "--repeat", "1", "--long-prompts", "1") == 0
    assert "A long prompt every 0.5 s: the slowest policy keeps up with that." in capsys.readouterr().out


def test_a_log_keeps_lines_of_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--policies", "fixed:16", "--repeat", "2", "--long-prompts", "1", "--interval", "50ms")
    assert stall(*arguments) == 0
    assert "run 2 of 2" not in capsys.readouterr().err  # it took less than half a minute
    monkeypatch.setattr("evenflow.cli.output.PROGRESS_INTERVAL_S", 0.0)
    assert stall(*arguments) == 0
    err = capsys.readouterr().err
    assert re.search(r"^Measuring steps; \d+% done, about \d+ s left$", err, re.MULTILINE)
    assert re.search(r"^fixed:16, long prompt 1, run 2 of 2; \d+% done, about \d+ s left$", err, re.MULTILINE)


def test_causes_of_a_gap() -> None:
    causes = [Cause(CauseKind.PREFILL, 1.55, "long-1", 1000), Cause(CauseKind.DECODES, 0.04)]
    assert [_cause_text(cause) for cause in causes] == ["1550 ms: 1,000 tokens of long-1", "40 ms: decodes"]


def test_quick_takes_one_run_of_shorter_prompts_one_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--chats", "2", "--chat-tokens", "10", "--threads", "1", "--policies", "fixed:512", "--quick"]
    assert main(["bench", "stall", "--model", str(long_context_llama()), *quick, "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["repeat"], report["long_tokens"], report["interval_s"]) == (1, 1000, 0.0)
    assert 1 <= report["long_prompts"] <= 3


@pytest.mark.slow
def test_an_interrupt_prints_the_figures_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_NATIVE", "0")  # nothing to compile for this test's own cache
    interrupt = (
        "import os, signal\n"
        "from evenflow.bench import stall\n"
        "run_load, num_runs = stall.run_load, 0\n"
        "def run(engine, load, on_progress):\n"
        "    global num_runs\n"
        "    num_runs += 1\n"
        "    if num_runs == 4: os.kill(os.getpid(), signal.SIGINT)\n"  # two measure
        "    return run_load(engine, load, on_progress)\n"
        "stall.run_load = run\n"
    )
    arguments = ["--policies", "fixed:16,fixed:32", "--repeat", "1", "--interval", "50ms", "--json", "-"]
    line = command_line(["bench", "stall", "--model", tiny_llama(), *SMALL, *arguments], before=interrupt)
    finished = subprocess.run(line, capture_output=True, text=True, preexec_fn=restore_interrupts, check=False)
    assert finished.returncode == 130, finished.stderr
    report = json.loads(finished.stdout)
    assert [run["policy"] for run in report["runs"]] == ["fixed:16"]
    assert not report["complete"]
    assert "Interrupted after 1 of 2 turns" in finished.stderr
    assert "Stopping after the step that runs now; Ctrl-C again quits at once.\n" in finished.stderr
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fixed:16,sometimes"], "policy='sometimes'"),
        (["--policies", "fixed:16,fixed:16"], "each once"),
        (["--interval", "soon"], "50ms or 0.3s"),
        (["--long-tokens", "100000"], "100016 tokens"),
        (["--plot", "/no/such/folder/stall.png"], "no file can be written"),
    ],
)
def test_bad_input_gives_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert stall(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_missing_matplotlib_fails_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert stall("--plot", str(tmp_path / "stall.png")) == 1
    assert "plots need matplotlib" in capsys.readouterr().err


def test_tbt_target_is_a_duration(capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", "one two three", "--model", str(tiny_llama()), "--max-tokens", "2", "--json", "-"]
    assert main([*generate, "--tbt-target", "0.5s"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "target:500ms"
    assert main([*generate, "--tbt-target", "50"]) == 2
    assert '50 seconds; write "50ms"' in " ".join(capsys.readouterr().err.split())
    assert main([*generate, "--tbt-target", "50ms", "--policy", "fixed:64"]) == 2
    assert "two policies" in capsys.readouterr().err
