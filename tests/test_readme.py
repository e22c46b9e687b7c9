"""README's commands are ones that can be typed as they stand."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.main import get_command

from evenflow.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = "\n".join(re.findall(r"```console\n(.*?)```", README, re.DOTALL))
COMMANDS = re.findall(r"^\$ \.venv/bin/evenflow (.*)$", BLOCKS, re.MULTILINE)
INLINE = re.findall(r"`evenflow ([a-z][^`\[]*)`", README)
TARGETS = re.findall(r"^\$ make ([a-z-]+)", BLOCKS, re.MULTILINE)


def parse(command: Any, words: list[str]) -> None:
    """Raises an error if the command does not take these words. Files to read must exist; nothing runs."""
    with command.make_context("evenflow", list(words)) as context:  # closes the files
        if getattr(command, "commands", None):
            _, chosen, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            parse(chosen, rest)


def test_there_are_some() -> None:
    assert len(COMMANDS) >= 4
    assert len(INLINE) >= 4
    assert TARGETS


@pytest.mark.parametrize("line", [*COMMANDS, *INLINE])
def test_a_command_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parse(get_command(app), shlex.split(line, comments=True))


@pytest.mark.parametrize("target", sorted(set(TARGETS)))
def test_make_has_the_target(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_wheels_of_torch_without_cuda_are_accepted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = Requirement((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()[-1])
    [version] = [specifier.version for specifier in pinned.specifier]
    lines = [*project["optional-dependencies"]["engine"], *project["optional-dependencies"]["compile"]]
    allowed = [line for line in map(Requirement, lines) if line.name == "torch"]
    assert len(allowed) == 2
    assert all(requirement.specifier.contains(f"{version}+cpu") for requirement in [pinned, *allowed])
