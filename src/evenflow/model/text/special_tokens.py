"""Keeps text that happens to spell a special token from becoming one.

A chat template joins its own special tokens and what people wrote into one text. `protect` finds the tokens that the
template did not write, whole in one field or put together from several, and breaks them by a mark; the
pieces between marks are then encoded one by one. Text without such tokens is not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

BREAK = "\ufdd0"  # never part of a text: Unicode reserves these
END_OF_MESSAGE = "\ufddf"  # likewise
_DELIMITERS = "<>|[]"
_SHADOW_CHARACTERS = "".join(chr(0xFDD1 + place) for place in range(len(_DELIMITERS)))
_SHADOWS = str.maketrans(_DELIMITERS, _SHADOW_CHARACTERS)
_FROM_SHADOWS = str.maketrans(_SHADOW_CHARACTERS, _DELIMITERS)
_DELIMITER = re.compile(f"[{re.escape(_DELIMITERS)}]")

Change = Callable[[str], str]


class SpecialTokens:
    """The special tokens of one vocabulary."""

    def __init__(self, tokens: Iterable[str]) -> None:
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._spelled = any(not _DELIMITER.search(token) for token in longest_first)

    def protect(self, render: Callable[[Change | None], str], given: Iterable[Any]) -> str:
        """What `render` gives, with a `BREAK` in each special token that comes from the strings in `given`.

        `render` takes a change to make to each of those strings, and may be called several times.
        """
        text = render(None)
        if not any(self._is_suspect(one) for value in given for one in strings_in(value)):
            return text
        # Shadows of the delimiters keep what people wrote from being a token, so all tokens here are the template's.
        shadowed = render(lambda one: self.broken(one).translate(_SHADOWS))
        own = self._pattern.findall(shadowed)
        if self._pattern.findall(text) == own:
            return text
        text = render(self.broken)
        if self._pattern.findall(text) == own:
            return text
        return self._unshadowed(shadowed)

    def broken(self, text: str) -> str:
        """The text with a break in each special token."""
        return self._pattern.sub(lambda found: f"{found[0][0]}{BREAK}{found[0][1:]}", text)

    def _is_suspect(self, text: str) -> bool:
        return _DELIMITER.search(text) is not None or (self._spelled and self._pattern.search(text) is not None)

    def _unshadowed(self, text: str) -> str:
        """The text without shadows: between the template's tokens, any token that then appears is broken."""
        start, parts = 0, []
        for found in self._pattern.finditer(text):
            parts += [self.broken(text[start : found.start()].translate(_FROM_SHADOWS)), found[0]]
            start = found.end()
        return "".join([*parts, self.broken(text[start:].translate(_FROM_SHADOWS))])


def strings_in(value: Any) -> Iterable[str]:
    """All strings of a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from strings_in(name)
            yield from strings_in(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from strings_in(one)


def with_strings(value: Any, change: Change) -> Any:
    """The value with each of its strings changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(name): with_strings(one, change) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [with_strings(one, change) for one in value]
    return value
