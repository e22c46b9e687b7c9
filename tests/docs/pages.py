"""The pages that people read, and what in them can be run: fenced blocks, and commands in running text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import typer

from tests.cli.running import parse_arguments

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(?:python -m )?evenflow ([a-z][^`\[]*)`")


class Block(NamedTuple):
    page: str
    line: int  # of its first line, from 1
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = PAGES[page]
    return [
        Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2])  # the fence itself is a line
        for found in _FENCE.finditer(text)
    ]


def commands(block: Block) -> Iterator[str]:
    """What stands behind a `$` in a console block, over several lines where one ends in a backslash or in a quote."""
    lines = iter(block.text.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue  # it is output
        command = line.removeprefix("$ ")
        while command.endswith("\\") or _is_open(command):
            command += "\n" + next(lines)
        yield command


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


def evenflow_arguments(command: str) -> list[str] | None:
    """What a command gives to `evenflow`; None if it runs something else."""
    found = words(command)
    if found[:3] == ["python", "-m", "evenflow"]:
        return found[3:]
    return found[1:] if found[0] in ("evenflow", ".venv/bin/evenflow") else None


def inline_commands(page: str) -> list[str]:
    """Commands in running text, such as `evenflow analyze DATA`."""
    return _INLINE.findall(_FENCE.sub("", PAGES[page]))


def parse(arguments: list[str]) -> None:
    """Raises an error if `evenflow` does not take these arguments."""
    with suppress(typer.Exit):  # --help
        parse_arguments(arguments)


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:  # a quote without its end
        return True
    return False
