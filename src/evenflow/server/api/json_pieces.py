"""Writes JSON in pieces, so that a long response is never in memory as a whole: neither as objects nor as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

PIECE_BYTES = 1 << 18
_ITEMS_AT_ONCE = 64

Item = TypeVar("Item")


class Rows(Generic[Item]):
    """A long list, each item of which is made when it is written. If it is shared, it is written once."""

    def __init__(self, items: Sequence[Item], make: Callable[[Item], object], *, is_shared: bool = False) -> None:
        self._items = items
        self._make = make
        self._written: list[bytes] | None = [] if is_shared else None

    def made(self) -> list[object]:
        return [self._make(item) for item in self._items]

    def pieces(self) -> Iterator[bytes]:
        """The JSON text of the list."""
        if self._written:
            yield from self._written
            return
        for piece in self._write():
            if self._written is not None:
                self._written.append(piece)
            yield piece

    def _write(self) -> Iterator[bytes]:
        yield b"["
        for first in range(0, len(self._items), _ITEMS_AT_ONCE):
            made = [self._make(item) for item in self._items[first : first + _ITEMS_AT_ONCE]]
            yield (b"," if first else b"") + encode_json(made)[1:-1]
        yield b"]"


def _as_list(value: Any) -> list[object]:
    if isinstance(value, Rows):
        return value.made()
    raise TypeError(type(value))


encode_json = msgspec.json.Encoder(enc_hook=_as_list).encode


def json_pieces(value: object) -> Iterator[bytes]:
    """The JSON text of a response, in pieces that a thread can make one by one."""
    pending = bytearray()
    for part in _parts(value):
        pending += part
        if len(pending) >= PIECE_BYTES:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending)


def _parts(value: object) -> Iterator[bytes]:
    """Objects part by part, and lists that hold some."""
    if isinstance(value, Rows):
        yield from value.pieces()
    elif isinstance(value, dict):
        for place, (name, field) in enumerate(value.items()):
            yield (b"," if place else b"{") + encode_json(name) + b":"
            yield from _parts(field)
        yield b"}" if value else b"{}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for place, item in enumerate(value):
            yield b"," if place else b"["
            yield from _parts(item)
        yield b"]"
    else:
        yield encode_json(value)
