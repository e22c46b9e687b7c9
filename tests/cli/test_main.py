"""The command as a whole: help without torch, one line for every error, exit codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from evenflow import __version__
from evenflow.cli.completion import complete_policy
from evenflow.cli.main import app
from evenflow.core.policies import PolicySpec, policy_kinds
from tests.cli.running import command_line, long_context_llama, restore_interrupts, run_cli, run_process
from tests.models import tiny_llama

COMMANDS = (
    *(["generate"], ["chat"], ["demo"], ["bench"], ["bench", "mixed"]),
    *(["analyze"], ["explain"], ["doctor"], ["eval"]),
)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from evenflow.cli.main import main\n"
        f"for command in {[[], *COMMANDS]}:\n"
        "    assert main([*command, '--help']) == 0\n"
        "    heavy = [name for name in ('torch', 'transformers', 'tokenizers', 'gguf') if name in sys.modules]\n"
        "    assert not heavy, (command, heavy)\n"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout.count("Usage: evenflow") == 1 + len(COMMANDS)


def help_text(command: list[str], columns: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    get_command(app).main([*command, "--help"], prog_name="evenflow", standalone_mode=False, terminal_width=columns)
    return capsys.readouterr().out


def all_commands(group: Any, *names: str) -> Iterator[list[str]]:
    yield list(names)
    for name, command in getattr(group, "commands", {}).items():
        yield from all_commands(command, *names, name)


@pytest.mark.parametrize("command", list(all_commands(get_command(app))), ids=" ".join)
def test_help_is_not_cut_off_in_a_terminal_of_80_columns(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    narrow, wide = (help_text(command, columns, capsys) for columns in (78, 1000))
    usage, _, text = narrow.partition("\n\n")
    assert usage.startswith("Usage: evenflow")
    assert all(len(line) <= 78 for line in narrow.splitlines())
    assert not re.search(r"\w ?\.\.\.(\s|$)", text)
    assert text.split() == wide.partition("\n\n")[2].split()


def test_alone_it_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    finished = run_cli(capsys)
    assert finished.code == 0
    assert all(command[0] in finished.out for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(capsys, "--version") == (0, f"evenflow {__version__}\n", "")


@pytest.mark.slow
def test_the_slow_path_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("EVENFLOW_NATIVE", raising=False)
    finished = run_process("generate", "Hi", "--model", tiny_llama(), "--policy", "unchunked", "--max-tokens", 1)
    assert finished.code == 0, finished.err
    [warning, _] = finished.err.splitlines()
    assert warning.startswith("evenflow: Running on torch's CPU operations, without evenflow's faster kernels: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["bench"], "Missing command."),
        (["generate", "Hi", "--nonsense"], "No such option: --nonsense"),
        (["generate", "Hi", "there"], "unexpected extra argument"),
        (["generate", "Hi", "--max-tokens"], "--max-tokens"),
        (["generate", "Hi", "--max-tokens", "many"], "--max-tokens"),
        (["demo", "nonsense"], "'nonsense'"),
        (["bench", "mixed", "--repeat", "0"], "--repeat"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = run_cli(capsys, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("evenflow: ")
    assert message in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.slow
def test_a_failing_step_is_one_line_and_code_1() -> None:
    break_steps = (
        "from evenflow.executors.torch_executor import TorchExecutor\n"
        "def fail(self, plan, began): raise MemoryError\n"
        "TorchExecutor._step = fail\n"
    )
    finished = run_process("generate", "Hi", "--model", tiny_llama(), before=break_steps)
    assert (finished.code, finished.out) == (1, "")
    assert finished.err.startswith("evenflow: Memory ran out")
    assert "gpu_memory_utilization" in finished.err
    assert finished.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "Hi"],
        pytest.param(["bench", "mixed"], marks=pytest.mark.slow),
        pytest.param(["ab", "fixed:8", "unchunked"], marks=pytest.mark.slow),
        ["serve", "--port", "0"],
    ],
)
def test_a_wrong_model_is_said_before_the_slow_imports(arguments: list[str]) -> None:
    probe = "import atexit\natexit.register(lambda: print('torch' in sys.modules))\n"
    finished = run_process(*arguments, "--model", "/no/such/model", before=probe)
    assert (finished.code, finished.out) == (2, "False\n"), finished.err
    assert finished.err.startswith("evenflow: no model at /no/such/model")


def test_a_second_interrupt_ends_it_at_once() -> None:
    endless_step = (
        "import time\n"
        "from evenflow.cli.interrupts import stopping_after_step\n"
        "with stopping_after_step():\n"
        "    try:\n"
        "        print('running', flush=True)\n"
        "        while True: time.sleep(1)\n"
        "    finally:\n"
        "        while True: time.sleep(1)\n"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", endless_step], **pipes, preexec_fn=restore_interrupts) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
    assert said == b"Stopping after the step that runs now; Ctrl-C again quits at once.\n"


def test_a_missing_engine_is_one_line_and_code_1() -> None:
    finished = run_process("generate", "Hi", "--model", tiny_llama(), before="sys.modules['torch'] = None")
    assert (finished.code, finished.out) == (1, "")
    assert "pip install 'evenflow[engine]'" in finished.err
    assert finished.err.count("\n") == 1


def endless(*more: object) -> list[str]:
    arguments = ["generate", "Hi", "--model", long_context_llama(), "--max-tokens", 4000, "--ignore-eos", *more]
    return command_line(arguments)


def test_an_interrupt_ends_it_without_a_traceback() -> None:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(endless(), **pipes, preexec_fn=restore_interrupts) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)  # wait until it streams
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        errors = process.stderr.read()
    assert process.returncode == 130, errors.decode()
    assert b"Traceback" not in errors


ANALYZE = ["analyze", "--preset", "evaluation"]
MOMENTS = {
    "at the first import": ("evenflow.cli.main", ANALYZE),
    "in the commands' imports": ("rich.console", ANALYZE),
    "in an import that drops interrupts": ("numpy", ["generate", "Hi", "--model"]),
    "in the engine's imports": ("evenflow.model.loader", ["generate", "Hi", "--model"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "arguments"), MOMENTS.values(), ids=MOMENTS)
def test_an_interrupt_during_imports_prints_nothing(module: str, arguments: list[str]) -> None:
    model = [str(tiny_llama())] if arguments[-1] == "--model" else []
    interrupt = (
        "import os, signal, sys, runpy\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            try: os.kill(os.getpid(), signal.SIGINT)\n"
        "            except KeyboardInterrupt: pass\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "runpy.run_module('evenflow', run_name='__main__', alter_sys=True)\n"
    )
    line = [sys.executable, "-c", interrupt, *arguments, *model]
    finished = subprocess.run(line, capture_output=True, preexec_fn=restore_interrupts, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (130, b"", b"")


def test_it_runs_as_a_module() -> None:
    finished = subprocess.run([sys.executable, "-m", "evenflow", "--version"], capture_output=True, check=True)
    assert finished.stdout.decode() == f"evenflow {__version__}\n"


def complete(words: str, **more: str) -> list[str]:
    asked = {"_EVENFLOW_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    line = [sys.executable, "-m", "evenflow"]
    finished = subprocess.run(line, env=os.environ | asked | more, capture_output=True, text=True, check=False)
    return finished.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("evenflow gen", ["generate"], marks=pytest.mark.slow),
        pytest.param("evenflow bench st", ["stall"], marks=pytest.mark.slow),
        ("evenflow bench stall --qu", ["--quick"]),
        ("evenflow serve --policy ta", ["target:200ms", "target:200ms,paced"]),
        pytest.param("evenflow ab unc", ["unchunked"], marks=pytest.mark.slow),
    ],
)
def test_a_shell_completes_commands_options_and_policies(words: str, expected: list[str]) -> None:
    assert complete(words) == expected


@pytest.mark.slow
def test_a_shell_completes_models_by_name_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pulled.gguf").touch()
    for name in ("here.gguf", "folder/config.json", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    own = {"EVENFLOW_CACHE": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    assert complete("evenflow generate Hi --model ", **own) == ["default", "pulled", "folder", "here.gguf"]
    assert complete("evenflow generate Hi --model /", **own) == []  # the shell completes paths itself


def test_every_policy_is_offered_by_a_shell() -> None:
    offered = dict(complete_policy(""))
    assert {PolicySpec.parse(policy).kind for policy in offered} == set(policy_kinds())
    assert all(offered.values())


@pytest.mark.slow
def test_a_shell_gets_a_script_for_completion() -> None:
    # One more command: a shell would replace itself with the last one, and could not be detected.
    line = ["bash", "-c", f"{sys.executable} -m evenflow --show-completion; true"]
    finished = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "_EVENFLOW_COMPLETE=complete_bash" in finished.stdout


@pytest.mark.slow
def test_a_reader_that_leaves_ends_it_without_a_traceback() -> None:
    with subprocess.Popen(endless(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 1
    assert b"Traceback" not in errors
