"""Runs a page from top to bottom: its commands and its Python, in one folder, with one set of ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cli.running import command_line, run_cli
from tests.docs.pages import ROOT, Block, blocks, commands, evenflow_arguments, parse, words
from tests.docs.stand_ins import LANGUAGES_NOT_RUN, PORTS, replace, shortened, why_not_run

_START_S = 120  # only there to fail instead of hanging


class PageRun:
    """One page's run. Servers that it starts go on until the next one at the same port, or until the page ends."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], stack: ExitStack) -> None:
        self.folder = folder
        self.capsys = capsys
        self.ports = _free_ports()
        self.names: dict[str, Any] = {"__name__": "page"}
        self._stack = stack
        self._servers: dict[str, ExitStack] = {}
        self._runners: dict[str, Callable[[Block], None]] = {
            "python": self._run_python,
            "console": self._run_console,
            "json": self._read_json,
            "yaml": self._read_yaml,
            "toml": self._write_toml,
        }

    def run(self, page: str) -> None:
        for block in blocks(page):
            if block.language in LANGUAGES_NOT_RUN:
                continue
            try:
                self._runners[block.language](block)
            except Exception as error:
                error.add_note(f"in {block.place}")
                raise

    def _run_python(self, block: Block) -> None:
        code = "\n" * (block.line - 1) + replace(block.text, self.ports)  # errors then name the page's lines
        exec(compile(code, ROOT / block.page, "exec"), self.names)

    def _run_console(self, block: Block) -> None:
        for command in commands(block):
            self._run_command(command)

    def _read_json(self, block: Block) -> None:
        try:
            json.loads(block.text)
        except ValueError:
            for line in block.text.splitlines():  # JSON lines
                json.loads(line)

    def _read_yaml(self, block: Block) -> None:
        assert list(yaml.safe_load_all(block.text))

    def _write_toml(self, block: Block) -> None:
        """Its first line, a comment, names the file that later commands read."""
        name = block.text.splitlines()[0].removeprefix("# ")
        (self.folder / name).write_text(block.text)

    def _run_command(self, command: str) -> None:
        arguments = evenflow_arguments(command)
        if why_not_run(command):
            if arguments is not None:
                parse(arguments)
            return
        command = replace(command, self.ports)
        if words(command)[0] == "make":
            command = _recipe(words(command)[1])
        arguments = evenflow_arguments(command)
        if arguments is None or "|" in command:
            self._run_in_shell(command)
        elif arguments[:1] == ["serve"]:
            self._serve(shortened(arguments))
        else:
            done = run_cli(self.capsys, *shortened(arguments))
            assert done.code == 0, f"{command}\n{done.out}\n{done.err}"

    def _run_in_shell(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-c", f"set -e -o pipefail\n{command}"],
            env={**os.environ, "PATH": f"{self._programs()}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"  # a server's; curl calls that a success

    def _programs(self) -> Path:
        """A folder with `evenflow` and `python` as this process has them."""
        folder = self.folder / ".programs"
        if not folder.exists():
            folder.mkdir()
            texts = {
                "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',  # a link would leave its environment
                "evenflow": f"#!{sys.executable}\nfrom evenflow.cli.main import main\nraise SystemExit(main())\n",
            }
            for name, text in texts.items():
                (folder / name).write_text(text)
                (folder / name).chmod(0o755)
        return folder

    def _serve(self, arguments: list[str]) -> None:
        if "--port" not in arguments:
            arguments += ["--port", str(self.ports["8000"])]
        port = arguments[arguments.index("--port") + 1]
        if port in self._servers:
            self._servers.pop(port).close()
        self._servers[port] = self._stack.enter_context(ExitStack())
        self._servers[port].enter_context(_served(arguments, port, self.folder / f"serve-{port}.log"))


@contextmanager
def _served(arguments: list[str], port: str, log: Path) -> Any:
    with log.open("w") as output:
        process = subprocess.Popen(command_line(arguments), stdout=output, stderr=output)
    try:
        _wait_until_ready(process, port, log)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_START_S)


def _wait_until_ready(process: subprocess.Popen[bytes], port: str, log: Path) -> None:
    for _ in range(10 * _START_S):
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", verify=False).status_code == 200:
                return
        except httpx.TransportError:
            pass  # it does not listen yet
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        break
    raise AssertionError(f"the server did not start:\n{log.read_text()}")


def _free_ports() -> dict[str, int]:
    with ExitStack() as stack:
        found = {}
        for port in PORTS:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            found[port] = listener.getsockname()[1]
        return found


def _recipe(target: str) -> str:
    """What `make` runs for a target, if that is one command of evenflow."""
    found = re.search(rf"^{target}:.*\n\t\$\(BIN\)/(evenflow .*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found, f"make {target} is no command of evenflow: say in NOT_RUN why it is not run"
    return re.sub(r"\$\(\w+\)", "", found[1])
