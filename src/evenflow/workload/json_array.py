"""The elements of a JSON file one after the other: of the array that it is, or of one inside the object that it is.

Must not know: what the elements mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

_SPACE = re.compile(r"[ \t\r\n]*")
_READ_CHARACTERS = 1 << 20
_MAX_ELEMENT_CHARACTERS = 1 << 28  # beyond that it is not long but broken


def iterate_json(text: TextIO) -> Iterator[Any]:
    """A large array is never held as a whole; an object is: it may hold the records in any of its fields."""
    buffer = _Buffer(text)
    if buffer.next_character() == "[":
        yield from _array_elements(buffer)
        return
    content = json.loads(buffer.rest())
    yield from _records_in(content)


def _records_in(content: Any) -> Iterator[Any]:
    """Datasets are often an object with a list of records beside a version; any other object is a record itself."""
    lists = [value for value in content.values() if _is_list_of_objects(value)] if isinstance(content, dict) else []
    if lists and not any(key == "messages" for key in content):
        yield from max(lists, key=len)
    else:
        yield content


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _array_elements(buffer: _Buffer) -> Iterator[Any]:
    buffer.skip(1)
    if buffer.next_character() == "]":
        return
    while True:
        yield buffer.take_value()
        separator = buffer.next_character()
        buffer.skip(1)
        if separator == "]":
            return
        if separator != ",":
            raise ValueError(f"expected , or ] between elements, not {separator!r}")


class _Buffer:
    """A window on the text that grows only as far as one element needs."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._window = ""
        self._position = 0
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """The next one that is not space, which is not taken; empty at the end."""
        while True:
            space = _SPACE.match(self._window, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._window) or not self._grow(_READ_CHARACTERS):
                return self._window[self._position : self._position + 1]

    def skip(self, num_characters: int) -> None:
        self._position += num_characters

    def take_value(self) -> Any:
        self.next_character()
        wanted = _READ_CHARACTERS
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._position)
            except ValueError:
                # Doubling what is read keeps the repeated attempts at a huge element within twice its length.
                if len(self._window) - self._position > _MAX_ELEMENT_CHARACTERS or not self._grow(wanted):
                    raise
                wanted *= 2
                continue
            if end == len(self._window) and self._grow(_READ_CHARACTERS):
                continue  # it was cut where a shorter value could end
            self._position = end
            return value

    def rest(self) -> str:
        return self._window[self._position :] + self._text.read()

    def _grow(self, num_characters: int) -> bool:
        more = self._text.read(num_characters)
        self._window = self._window[self._position :] + more
        self._position = 0
        return bool(more)
