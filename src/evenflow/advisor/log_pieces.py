"""Puts a log together again that was pasted in pieces: messages wrapped over lines, figures on a line each.

Knows what a line of a log looks like, not what it says.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b"
_TIME = r"(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d)"
_BEGINS_MESSAGE = re.compile(rf"\W{{0,20}}(?:\([^)]{{1,60}}\) *)?(?:{_LEVEL}|{_TIME})")
_MARKS = " \t>|`"  # of quotes, tables and code
_BULLETS = ("- ", "* ", "+ ", "• ", "· ")
_FENCES = ("```", "~~~")
_KEPT = 300  # characters of a message's start and end: the one says what it is about, the other may be broken off
_WRAP_COLUMNS = 60  # a shorter line was not broken inside a word
_MAX_GAP = 8  # lines between two figures of one block


def bare(line: str) -> str:
    """The line without its marks."""
    piece = line.strip(_MARKS)
    return piece[2:].lstrip(_MARKS) if piece.startswith(_BULLETS) else piece


class Message:
    """The message that the next line may continue, broken between words or, by a terminal, inside them."""

    def __init__(self) -> None:
        self._with_spaces = ""
        self._without = ""
        self._last_length = 0

    def take(self, line: str) -> list[tuple[str, int]]:
        """If this line continues the message: the message in each way it may be broken, and where the line begins."""
        if line.lstrip().startswith(_FENCES):
            return []
        piece, last_length = bare(line), self._last_length
        self._last_length = len(line)
        if not piece or not self._with_spaces or _BEGINS_MESSAGE.match(line):
            self._with_spaces = self._without = _shortened(piece)
            return []
        joined = [(f"{self._with_spaces} {piece}", len(self._with_spaces) + 1)]
        if last_length >= _WRAP_COLUMNS:
            joined.insert(0, (f"{self._without}{piece}", len(self._without)))
        self._with_spaces = _shortened(f"{self._with_spaces} {piece}")
        self._without = _shortened(f"{self._without}{piece}")
        return joined


def _shortened(message: str) -> str:
    return message if len(message) <= 2 * _KEPT else f"{message[:_KEPT]} ... {message[-_KEPT:]}"


@dataclass(slots=True)
class Block:
    """Figures of one moment, from one line or from several that follow each other."""

    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    first_line_number: int = 0
    last_line_number: int = 0

    def takes(self, name: str, line_number: int) -> bool:
        """Whether a figure belongs to this block: it has none of that name, and is not far away."""
        return not self.figures or (name not in self.figures and line_number - self.last_line_number <= _MAX_GAP)

    def add(self, name: str, value: Any, line: str, line_number: int) -> None:
        if not self.figures:
            self.first_line_number = line_number
        if line_number != self.last_line_number:
            self.lines.append(line)
        self.figures[name] = value
        self.last_line_number = line_number

    @property
    def text(self) -> str:
        return self.lines[0] if len(self.lines) == 1 else " | ".join(bare(line).rstrip(",;") for line in self.lines)
