"""`evenflow eval` on the command line: endpoints, comparisons, and runs that were killed."""

from __future__ import annotations

import atexit
import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import command_line, run_cli
from tests.models import tiny_hf_folder, tiny_llama
from tests.server.serving import MODEL, model_server

TASKS = [
    {"id": "exact", "scorer": "exact", "prompt": "Say yes.", "reference": "yes", "max_tokens": 8},
    {"id": "stop", "scorer": "regex", "prompt": "One two three", "reference": ".", "max_tokens": 40, "stop": ["e"]},
    {"id": "number", "scorer": "numeric", "prompt": "1 + 1 =", "reference": 2, "max_tokens": 8},
    {"id": "choice", "scorer": "choice", "prompt": "It is", "choices": [" hot", " 12", " é"], "reference": " hot"},
    {"id": "json", "scorer": "json-schema", "prompt": "{", "reference": {"type": "object"}, "max_tokens": 8},
    {
        "id": "chat",
        "scorer": "exact",
        "messages": [{"role": "user", "content": "Say yes."}],
        "reference": "yes",
        "max_tokens": 8,
    },
]
_ONE_OF_EACH = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}  # prompts are long
CODE = {"id": "code", "scorer": "code", "prompt": "x =", "prefix": "x = 1 #", "reference": "assert x == 1"}


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return write(tmp_path, *TASKS)


def write(tmp_path: Path, *records: dict[str, Any]) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@cache
def long_llama() -> Path:
    """A small random Llama with room for the prompts of the shipped set `retrieval`, made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="evenflow-longer-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_hf_folder(folder, "LlamaForCausalLM", max_position_embeddings=16384, **_ONE_OF_EACH)


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The report of a run that succeeds."""
    finished = run_cli(capsys, "eval", *arguments, "--json", "-")
    assert finished.code == 0, finished.err
    report: dict[str, Any] = json.loads(finished.out)
    return report


def journal_in(tasks: Path) -> tuple[object, ...]:
    return "--journal", tasks.parent / "journal"


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """All of a report that two runs must agree on."""
    kept = ("side", "task", "text", "is_correct", "note", "error", "num_tokens", "num_prompt_tokens", "num_chunks")
    comparison = {name: value for name, value in (report["comparison"] or {}).items() if name != "estimates"}
    return {
        "sides": [{name: value for name, value in side.items() if name != "figures"} for side in report["sides"]],
        "comparison": comparison,
        "answers": [{name: answer.get(name) for name in kept} for answer in report["answers"]],
        "errors": report["errors"],
    }


def num_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


def kill_when(is_time: Callable[[], bool], arguments: list[object]) -> None:
    with subprocess.Popen(command_line(["eval", *arguments]), stderr=subprocess.PIPE) as process:
        while not is_time():
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_chunked_against_unchunked_killed_half_way_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    num_tasks = 5
    run = ["retrieval", "--compare", "chunked,unchunked", "-n", num_tasks, "--concurrency", 1, "--threads", 1]
    run += ["--model", long_llama()]
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    kill_when(lambda: num_lines(killed) > num_tasks // 2, [*run, "--journal", killed])
    before = killed.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    num_before = before.count(b"\n") - 1
    assert 0 < num_before < 2 * num_tasks
    finished = run_cli(capsys, "eval", *run, "--journal", killed, "--resume", "--json", "-")
    assert f"Resuming: {num_before} of {2 * num_tasks} answers are there." in finished.err
    assert killed.read_bytes().startswith(before)  # what was answered is not asked again
    assert num_lines(killed) == 1 + 2 * num_tasks
    resumed, uninterrupted = json.loads(finished.out), evaluated(capsys, *run, "--journal", whole)
    assert without_times(resumed) == without_times(uninterrupted)

    a, b = resumed["sides"]
    assert (a["name"], b["name"]) == ("chunked (fixed:512)", "unchunked")
    assert (a["num_cut_prompts"], b["num_cut_prompts"]) == (num_tasks, 0)
    assert a["score"] == b["score"]
    comparison = resumed["comparison"]
    assert (comparison["num_pairs"], comparison["differences"]) == (num_tasks, [])
    assert comparison["identical_outputs"] is True
    ttft = next(one for one in comparison["estimates"] if one["name"] == "TTFT mean, s")
    low, high = ttft["interval"]
    assert 0 < low <= ttft["ratio"] <= high
    assert f"All {num_tasks} answers are the same on both sides." in finished.err


def test_a_complete_journal_is_reported_without_loading_anything(
    tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tasks.parent))
    run = (tasks, "--model", tiny_llama())
    first = evaluated(capsys, *run)
    [journal] = (tasks.parent / "evals").iterdir()
    assert first["journal"] == str(journal)
    monkeypatch.setattr("evenflow.cli.eval.open_sides", None)
    assert evaluated(capsys, *run, "--resume") == first


def test_every_scorer_on_the_embedded_engine(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tasks.parent, *TASKS, CODE)
    report = evaluated(capsys, tasks, "--model", tiny_llama(), "--run-code", "-m", "fixed:8", *journal_in(tasks))
    [side] = report["sides"]
    assert (side["name"], side["num_scored"], side["num_failed"], side["num_missing"]) == ("fixed:8", 7, 0, 0)
    answers = {answer["task"]: answer for answer in report["answers"]}
    assert answers["code"]["is_correct"] is True
    assert report["guards"] == [answers["code"]["guards"]]
    assert "e" not in answers["stop"]["text"]
    assert len(answers["choice"]["logprobs"]) == 3
    assert answers["choice"]["text"] in TASKS[3]["choices"]  # type: ignore[operator]
    assert 0 < side["interval"][0] < side["score"] < side["interval"][1]
    assert side["figures"]["latency mean, s"] > 0


@pytest.mark.slow
def test_a_server_answers_as_the_engine_does(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with model_server(str(tiny_llama())) as server:
        over_http = evaluated(capsys, tasks, "-m", server.url, "--model", MODEL, "--journal", tasks.parent / "http")
    embedded = evaluated(capsys, tasks, "--model", tiny_llama(), *journal_in(tasks))
    served, own = ({answer["task"]: answer for answer in one["answers"]} for one in (over_http, embedded))
    assert {task: answer["text"] for task, answer in served.items()} == {
        task: answer["text"] for task, answer in own.items()
    }
    assert served["choice"]["logprobs"] == pytest.approx(own["choice"]["logprobs"], abs=1e-3)
    assert all(served[task]["ttft_s"] > 0 for task in ("exact", "chat"))
    assert over_http["sides"][0]["num_scored"] == len(TASKS)


@pytest.fixture
def _without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes a while and does not matter here."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not in this test")

    monkeypatch.setattr("evenflow.compile.aot.packages.compile_step", refuse)
    monkeypatch.setattr("evenflow.compile.aot.packages.export_step", refuse)


@pytest.mark.usefixtures("_without_compiling")
def test_transformers_in_chunks_and_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = f"hf:{long_llama()},hf-unchunked:{long_llama()}"
    report = evaluated(capsys, "retrieval", "-n", 1, "--compare", sides, "--journal", tmp_path / "journal")
    assert [side["num_cut_prompts"] for side in report["sides"]] == [1, 0]
    assert report["comparison"]["identical_outputs"] is True


@pytest.mark.usefixtures("_without_compiling")
def test_transformers_answers_as_the_engine_does(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = evaluated(
        capsys, tasks, "--compare", f"hf:{tiny_llama()},fixed:8", "--model", tiny_llama(), *journal_in(tasks)
    )
    assert report["comparison"]["identical_outputs"] is True
    assert report["comparison"]["num_pairs"] == len(TASKS)
    assert report["comparison"]["largest_logprob_difference"] < 1e-3


def test_a_task_that_does_not_fit_is_a_failure_and_no_wrong_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write(tmp_path, TASKS[0], {**TASKS[0], "id": "long", "prompt": "word " * 400})
    journal = ("--journal", tmp_path / "journal")
    finished = run_cli(capsys, "eval", tasks, "--model", tiny_llama(), "--json", "-", *journal)
    assert finished.code == 0
    [side] = json.loads(finished.out)["sides"]
    assert (side["num_scored"], side["num_failed"]) == (1, 1)
    assert "task long failed: This model's maximum context length is 256 tokens" in finished.err
    tasks, journal = write(tmp_path, {**TASKS[0], "prompt": "word " * 400}), ("--journal", tmp_path / "another")
    finished = run_cli(capsys, "eval", tasks, "--model", tiny_llama(), *journal)
    assert (finished.code, finished.out) == (1, "")
    assert "All requests failed; the first: This model's maximum context" in finished.err


def test_no_task_starts_after_the_time_limit_and_a_resumed_run_does_the_rest(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = (tasks, "--model", tiny_llama(), "--journal", tasks.parent / "journal")
    finished = run_cli(capsys, "eval", *run, "--time-limit", 0)
    assert finished.code == 0
    assert f"{len(TASKS)} tasks were not asked; the same command with --resume goes on." in finished.out
    [side] = evaluated(capsys, *run, "--resume")["sides"]
    assert (side["num_scored"], side["num_missing"]) == (len(TASKS), 0)


@pytest.mark.slow
def test_an_interrupt_leaves_a_journal_to_go_on_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    endless = [{**TASKS[0], "id": str(n), "max_tokens": 4 if n < 2 else 8000} for n in range(3)]
    tasks, journal = write(tmp_path, *endless), tmp_path / "journal"
    arguments = ["eval", tasks, "--model", long_llama(), "--concurrency", 1, "--journal", journal]

    def restore_interrupts() -> None:
        """Shells ignore interrupts for processes that they run in the background, as tests may be."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command_line(arguments), stderr=subprocess.PIPE, preexec_fn=restore_interrupts) as process:
        while num_lines(journal) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    assert process.returncode == 130
    assert "Stopped with 2 of 3 answers; the same command with --resume goes on." in errors
    assert "Traceback" not in errors


BAD: dict[str, tuple[list[object], str]] = {
    "no such set": (["nonsense"], "arithmetic, code, knowledge, retrieval, structured"),
    "programs without consent": (["code"], "--run-code"),
    "one side": (["arithmetic", "--compare", "chunked"], "'chunked'"),
    "the same twice": (["arithmetic", "--compare", "chunked,fixed:512"], "twice"),
    "unknown policy": (["arithmetic", "--compare", "chunked,fastest"], "'fastest'"),
    "both ways to name sides": (["arithmetic", "-m", "unchunked", "--compare", "chunked,unchunked"], "--compare"),
    "a model as an endpoint": (["arithmetic", "-m", "default"], "--model"),
    "no folder": (["arithmetic", "-m", "hf:/no/such/model"], "'/no/such/model'"),
    "an engine's setting for a server": (["arithmetic", "-m", "http://127.0.0.1:9", "--weights", "int4"], "--weights"),
    "nothing to resume": (["arithmetic", "--resume"], "holds no journal"),
    "no model": (["arithmetic", "--model", "/no/such/model"], "/no/such/model"),
    "no items": (["arithmetic", "-n", 0], "-n"),
    "no concurrency": (["arithmetic", "--concurrency", 0], "--concurrency"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD)
def test_bad_input(
    arguments: list[object],
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    finished = run_cli(capsys, "eval", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert named in finished.err
    assert finished.err.count("\n") == 1


def test_a_journal_of_other_tasks_is_refused(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tasks.parent / "journal"
    assert run_cli(capsys, "eval", tasks, "--model", tiny_llama(), "--time-limit", 0, "--journal", journal).code == 0
    finished = run_cli(capsys, "eval", "arithmetic", "--model", tiny_llama(), "--journal", journal, "--resume")
    assert (finished.code, finished.out, finished.err.count("\n")) == (2, "", 1)
    assert "is of another run: other tasks" in finished.err


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = tmp_path / "journal"
    finished = run_cli(capsys, "eval", "arithmetic", "-m", "http://127.0.0.1:9", "--journal", journal)
    assert (finished.code, finished.out, finished.err.count("\n")) == (1, "", 1)
    assert not journal.exists()
    assert "no server at http://127.0.0.1:9 " in finished.err
