"""Runs the real command, in this process or a new one."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
from typer.main import get_command

from evenflow.cli.main import app, main
from tests.models import tiny_hf_folder, tiny_llama


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """`evenflow` with these arguments, in this process."""
    capsys.readouterr()
    logger = logging.getLogger("evenflow")
    level = logger.level
    with mock.patch.dict(os.environ):
        code = main([str(argument) for argument in arguments])
    logger.setLevel(level)  # which a server sets, as it sets the environment
    return Finished(code, *capsys.readouterr())


def run_process(*arguments: object, before: str = "", stdin: bytes = b"") -> Finished:
    """`evenflow` with these arguments, in a new process that first runs the code `before`."""
    finished = subprocess.run(command_line(arguments, before), input=stdin, capture_output=True, check=False)
    return Finished(finished.returncode, finished.stdout.decode(), finished.stderr.decode())


def command_line(arguments: Iterable[object], before: str = "") -> list[str]:
    code = f"import sys\n{before}\nfrom evenflow.cli.main import main\nsys.exit(main())"
    return [sys.executable, "-c", code, *map(str, arguments)]


def parse_arguments(arguments: list[str]) -> dict[str, Any]:
    """What the last command in these arguments takes them for; an error if it does not take them. Nothing runs.

    Files to read must exist. The name of a command alone only has to exist.
    """
    command: Any = get_command(app)
    while True:
        with command.make_context("evenflow", list(arguments)) as context:  # closes files
            if not getattr(command, "commands", None):
                return dict(context.params)
            _, command, arguments = command.resolve_command(context, [*context._protected_args, *context.args])
            if not arguments:
                return {}


def restore_interrupts() -> None:
    """Shells ignore interrupts for processes that they run in the background, as tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def read_address(process: subprocess.Popen[str]) -> str:
    """The address that a server names on its standard error once it is ready."""
    assert process.stderr is not None
    seen = ""
    while (found := re.search(r"http://[\d.:]+", seen)) is None:
        seen += (said := process.stderr.readline())
        assert said, f"it ended: {seen}"
    return found[0]


@contextmanager
def serving(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command on a free port, in a process group of its own, once it is ready."""
    line = command_line(["serve", "--port", 0, "--model", tiny_llama(), "--threads", 1, *arguments])
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            yield process, read_address(process)
        finally:
            if process.poll() is None:
                process.kill()


@cache
def long_context_llama() -> Path:
    """A small random Llama with room for the demo's prompts, made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="evenflow-long-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_hf_folder(folder, "LlamaForCausalLM", max_position_embeddings=4096)
