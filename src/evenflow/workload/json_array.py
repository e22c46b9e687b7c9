"""Reads the records of a JSON file one at a time: from its array, or from an array inside its object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from evenflow.workload.results import holds_requests

_SPACE = re.compile(r"[ \t\r\n]*")
_READ_CHARACTERS = 1 << 20
_MAX_ELEMENT_CHARACTERS = 1 << 28  # a longer one is broken


def iterate_json(text: TextIO) -> Iterator[Any]:
    """Stream a top-level array. An object is read whole: any of its fields may hold the records."""
    buffer = _Buffer(text)
    if buffer.next_character() == "[":
        yield from _array_elements(buffer)
    else:
        yield from _records_in(json.loads(buffer.rest()))


def _records_in(content: Any) -> Iterator[Any]:
    """The records in an object: its list of records, as beside a version number, or the object itself."""
    lists: list[list[Any]] = []
    if isinstance(content, dict) and "messages" not in content and not holds_requests(content):
        lists = [value for value in content.values() if isinstance(value, list)]
    objects = [value for value in lists if value and all(isinstance(item, dict) for item in value)]
    yield from max(objects, key=len, default=[content])


def _array_elements(buffer: _Buffer) -> Iterator[Any]:
    buffer.skip()
    if buffer.next_character() == "]":
        return
    while True:
        yield buffer.take_value()
        separator = buffer.next_character()
        if separator == "]":
            return
        if separator != ",":
            raise ValueError(f"expected , or ] between elements, not {separator!r}")
        buffer.skip()


class _Buffer:
    """A window on the text, no larger than one element needs."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._window = ""
        self._position = 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """Peek at the next non-space character; empty at the end."""
        while True:
            space = _SPACE.match(self._window, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._window) or not self._grow(_READ_CHARACTERS):
                return self._window[self._position : self._position + 1]

    def skip(self) -> None:
        self._position += 1

    def take_value(self) -> Any:
        self.next_character()
        wanted = _READ_CHARACTERS
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._position)
            except ValueError:
                # Doubling bounds the work of repeated attempts at a huge element to twice its length.
                if len(self._window) - self._position > _MAX_ELEMENT_CHARACTERS or not self._grow(wanted):
                    raise
                wanted *= 2
                continue
            if end == len(self._window) and self._grow(_READ_CHARACTERS):
                continue  # the window may have cut a longer value
            self._position = end
            return value

    def rest(self) -> str:
        return self._window[self._position :] + self._text.read()

    def _grow(self, num_characters: int) -> bool:
        more = self._text.read(num_characters)
        self._window = self._window[self._position :] + more
        self._position = 0
        return bool(more)
