"""Runs the real command, in this process or a new one."""

from __future__ import annotations

import atexit
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from evenflow.cli.main import main
from tests.models import tiny_hf_folder


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """`evenflow` with these arguments, in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return Finished(code, *capsys.readouterr())


def run_process(*arguments: object, before: str = "", stdin: bytes = b"") -> Finished:
    """`evenflow` with these arguments, in a new process that first runs the code `before`."""
    finished = subprocess.run(command_line(arguments, before), input=stdin, capture_output=True, check=False)
    return Finished(finished.returncode, finished.stdout.decode(), finished.stderr.decode())


def command_line(arguments: Iterable[object], before: str = "") -> list[str]:
    code = f"import sys\n{before}\nfrom evenflow.cli.main import main\nsys.exit(main())"
    return [sys.executable, "-c", code, *map(str, arguments)]


def restore_interrupts() -> None:
    """Shells ignore interrupts for processes that they run in the background, as tests may be."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@cache
def long_context_llama() -> Path:
    """A small random Llama with room for the demo's prompts, made once per process."""
    folder = Path(tempfile.mkdtemp(prefix="evenflow-long-llama-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return tiny_hf_folder(folder, "LlamaForCausalLM", max_position_embeddings=4096)
