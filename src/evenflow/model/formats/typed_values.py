"""Values by key from a model's file, each checked for its type when it is read."""

import reprlib
from collections.abc import Mapping
from typing import Any, TypeVar

from evenflow.errors import BrokenModel

Value = TypeVar("Value")

_INTEGERS = range(-(2**63), 2**64)  # JSON has larger ones, which no float holds


class TypedValues:
    """The object in a JSON file, or the metadata of a GGUF file. Errors name the key after `name`."""

    def __init__(self, name: str, content: Mapping[str, Any]) -> None:
        self.name = name
        self.content = content

    def get(self, key: str, kind: type[Value], default: Value | None = None) -> Value:
        """The value of `key`; BrokenModel if it is missing or null and there is no default."""
        value = self.optional(key, kind)
        value = default if value is None else value
        if value is None:
            raise BrokenModel(f"{self._full_name(key)} is missing")
        return value

    def optional(self, key: str, kind: type[Value]) -> Value | None:
        """The value of `key`, or None if it is missing or null."""
        value = self.content.get(key)
        if type(value) is int and value not in _INTEGERS:
            raise BrokenModel(f"{self._full_name(key)} is {reprlib.repr(value)}, which has more than 64 bits")
        if kind is float and type(value) is int:
            value = float(value)
        if value is not None and type(value) is not kind:
            raise BrokenModel(f"{self._full_name(key)} is {reprlib.repr(value)}, expected {kind.__name__}")
        return value

    def get_list(self, key: str, kind: type[Value], default: list[Value] | None = None) -> list[Value]:
        """A list; BrokenModel if an item is of another type."""
        values: list[Value] = self.get(key, list, default)
        if any(type(value) is not kind for value in values):
            raise BrokenModel(f"{self._full_name(key)} is not a list of {kind.__name__}")
        return values

    def _full_name(self, key: str) -> str:
        return f"{self.name}: {key}" if self.name else key
