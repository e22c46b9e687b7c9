"""Values as JSON and back, between the judge and an answer's process: plain data by value, all else as a number.

Lists, dictionaries and the like are places in a table that both sides keep, so that a change of one is seen by both.
Imports nothing but Python's library: it runs without site packages.
"""

from __future__ import annotations

import builtins
import enum
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

_MAX_INTEGER = 1 << 63  # larger ones are written in hexadecimal: Python limits the digits of decimal ones
_CONTAINERS = {
    kind.__name__: kind for kind in (list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter)
}  # those that can change
_MUTABLE = frozenset[type[Any]](_CONTAINERS.values())
_SETTINGS: Mapping[type[Any], str] = {deque: "maxlen", defaultdict: "default_factory"}
# The parts of an immutable value, and how they make it again.
_VALUES: Mapping[type[Any], tuple[Callable[[Any], Iterable[Any]], Callable[..., Any]]] = {
    tuple: (iter, lambda *items: items),
    frozenset: (iter, lambda *items: frozenset(items)),
    int: (lambda value: [hex(value)], lambda text: int(text, 16)),
    bytes: (lambda value: [value.hex()], bytes.fromhex),
    complex: (lambda value: [value.real, value.imag], complex),
    **{kind: (lambda value: [value.start, value.stop, value.step], kind) for kind in (range, slice)},
    type({}.keys()): (lambda value: [tuple(value)], lambda keys: dict.fromkeys(keys).keys()),
    type({}.items()): (lambda value: [tuple(value)], lambda items: dict(items).items()),
    type(...): (lambda value: [], lambda: ...),
    type(NotImplemented): (lambda value: [], lambda: NotImplemented),
    **{
        kind: (lambda value: value.__reduce__()[1], kind)
        for kind in (Decimal, Fraction, date, datetime, time, timedelta)
    },
}
_MAKERS = {kind.__name__: make for kind, (_, make) in _VALUES.items()}
# The content of an object whose class derives from a built-in one, whatever that class defines.
_CONTENT: Mapping[type[Any], Callable[[Any], Any]] = {
    str: str.__str__,
    int: int.__int__,
    float: float.__float__,
    bytes: bytes.__bytes__,
    dict: lambda value: dict(dict.items(value)),
    tuple: lambda value: tuple(tuple.__iter__(value)),
    list: lambda value: list(list.__iter__(value)),
    set: lambda value: set(set.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
PLAIN_KINDS = (*_CONTAINERS.values(), *_CONTENT)


def plain(value: Any) -> Any:
    """The content of an object whose class derives from a built-in one; NotImplemented if it does not."""
    return next((content(value) for base, content in _CONTENT.items() if isinstance(value, base)), NotImplemented)


def is_built_in(kind: type[Any]) -> bool:
    return vars(builtins).get(kind.__name__) is kind


def built_in_type(name: str, base: type[Any] = object) -> type[Any]:
    kind = vars(builtins)[name]
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise TypeError(name)
    return kind


class Values:
    """Writes values for the other side, and reads what that wrote; reading raises whatever is not written like this.

    `shared` are the containers of the calls in progress, the same ones in the same order on both sides. `export` and
    `import_` are asked about all objects that are not plain data.
    """

    def __init__(self, export: Callable[[Any], list[Any]], import_: Callable[..., Any]) -> None:
        self.shared: list[Any] = []
        self._export, self._import = export, import_
        self._places: dict[int, int] = {}  # of the shared containers, by id

    def write(self, value: Any) -> list[Any]:
        """The value, and all shared containers, to which those in the value are added."""
        self._places = {id(container): place for place, container in enumerate(self.shared)}
        head, contents = self.write_part(value), list[Any]()
        while len(contents) < len(self.shared):
            container = self.shared[len(contents)]
            kind = type(container)
            setting = getattr(container, _SETTINGS[kind]) if kind in _SETTINGS else None
            items = container.items() if isinstance(container, dict) else container
            contents.append([kind.__name__, self.write_part(setting), [self.write_part(item) for item in items]])
        return [head, contents]

    def write_part(self, value: Any) -> Any:
        """Atoms as they are, all else as a list that begins with its kind."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and -_MAX_INTEGER < value < _MAX_INTEGER):
            return value
        if kind in _MUTABLE:
            place = self._places.setdefault(id(value), len(self.shared))
            if place == len(self.shared):
                self.shared.append(value)
            return ["at", place]
        if kind in _VALUES and getattr(value, "tzinfo", None) is None:
            return [kind.__name__, *map(self.write_part, _VALUES[kind][0](value))]
        if isinstance(value, type) and is_built_in(value):
            return ["type", value.__name__]
        if isinstance(value, BaseException) and is_built_in(kind) and not isinstance(value, BaseExceptionGroup):
            return ["error", kind.__name__, *map(self.write_part, value.args)]
        if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
            return ["named tuple", kind.__name__, list(kind._fields), *map(self.write_part, plain(value))]
        if isinstance(value, str | bytes | int | float | tuple) and not isinstance(value, enum.Enum):
            return self.write_part(plain(value))
        return self._export(value)

    def read(self, head: Any, contents: list[Any]) -> Any:
        for name, setting, _ in contents[len(self.shared) :]:
            self.shared.append(_new_container(_CONTAINERS[name], self.read_part(setting)))
        for container, (name, _, parts) in zip(self.shared, contents, strict=True):
            if _CONTAINERS[name] is not type(container):
                raise ValueError("another kind of container")
            items = [self.read_part(part) for part in parts]
            container.clear()
            if isinstance(container, dict):
                for key, value in items:
                    container[key] = value
            elif isinstance(container, set):
                container.update(items)
            else:
                container.extend(items)
        return self.read_part(head)

    def read_part(self, part: Any) -> Any:
        if type(part) is dict:
            raise ValueError("no value")
        if type(part) is not list:
            return part
        kind, *rest = part
        if kind in _MAKERS:
            return _MAKERS[kind](*map(self.read_part, rest))
        match kind:
            case "at":
                return self.shared[rest[0]]
            case "type":
                return built_in_type(rest[0])
            case "error":
                return _new_error(built_in_type(rest[0], BaseException), tuple(map(self.read_part, rest[1:])))
            case "named tuple":
                name, fields, *values = rest
                return namedtuple(name, fields)(*map(self.read_part, values))
            case _:
                return self._import(kind, *rest)


def _new_container(kind: type[Any], setting: Any) -> Any:
    if kind is deque:
        return deque(maxlen=setting)
    return defaultdict(setting) if kind is defaultdict else kind()


def _new_error(kind: type[BaseException], arguments: tuple[Any, ...]) -> BaseException:
    try:
        return kind(*arguments)
    except TypeError:
        error = kind.__new__(kind)
        error.args = arguments
        return error
