"""Calls between the judge and an answer's process: plain data crosses by value, all else stays where it is.

What stays is known to the other side by a number, as a `Remote`. No code of one side runs on the other, so an answer
can lie only about values. Each message brings the mutable containers of a call up to date, so that a function may
change its arguments. Imports nothing but Python's library: it runs without site packages.
"""

from __future__ import annotations

import builtins
import copy
import io
import json
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from evenflow.evals.plain_values import PLAIN_KINDS, Values, built_in_type, is_built_in, plain

_MAX_MESSAGE = 32 << 20
_MAX_PRINTED = 1 << 20
_KEPT_CONTAINERS = 64  # read from objects of the other side; tests may change them between two calls

# What the tests say of an object: nothing; that its class has such a name; that the task itself declares its class.
LOOSE, NAMED, DECLARED = range(3)


class Ended(BaseException):
    """The other side is gone, or sent what is no message. No `except Exception` of a test catches it."""


def _awaited(coroutine: Any) -> Any:
    import asyncio  # slow

    return asyncio.run(coroutine)


# What one side may ask of an object of the other. The first ones are methods of a `Remote` as they are.
_METHODS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in (abs, bool, float, int, iter, len, next, repr, reversed, round, str)},
    **{name: getattr(operator, name) for name in ("neg", "pos", "invert", "getitem", "setitem", "delitem")},
    "copy": copy.copy,
}
_ORDER = ("eq", "ne", "lt", "le", "gt", "ge")
_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    **_METHODS,
    **{name: getattr(operator, name) for name in (*_ORDER, *_BINARY, "contains")},
    "call": lambda function, args, kwargs: function(*args, **kwargs),
    "get": getattr,
    "set": setattr,
    "delete": delattr,
    "isinstance": isinstance,
    "issubclass": issubclass,
    "deepcopy": copy.deepcopy,
    "awaited": _awaited,
    "plain": plain,
}
_OF_PLAIN_DATA = {name for kind in PLAIN_KINDS for name in dir(kind)}


class Origin(types.SimpleNamespace):
    """Where an object of the other side is."""

    border: Border
    number: int
    rank: int
    hash: int | None


class Remote:
    """An object of the other side.

    Compared with plain data, it is its plain content or nothing: an answer's `__eq__` never sees what a test expects.
    The methods and operators of plain data are passed on only where the tests name the object's class.
    """

    __slots__ = ("_remote",)
    _remote: Origin

    def __init__(self, origin: Origin) -> None:
        object.__setattr__(self, "_remote", origin)

    def _ask(self, operation: str, *arguments: Any) -> Any:
        return self._remote.border.request(operation, self, *arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return raise_rank(self._ask("call", args, kwargs), self._remote.rank)

    def __getattr__(self, name: str) -> Any:
        if self._remote.rank == LOOSE and name in _OF_PLAIN_DATA and not name.startswith("__"):
            raise AttributeError(f"got an object of the answer's own class, whose {name} a test cannot rely on")
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)

    def __delattr__(self, name: str) -> None:
        self._ask("delete", name)

    def __hash__(self) -> int:
        if self._remote.hash is None:
            raise TypeError("unhashable object of the answer")
        return self._remote.hash

    def __contains__(self, item: Any) -> bool:
        if self._remote.rank > LOOSE:
            return self._ask("contains", item) is True
        return any(item is one or item == one for one in self._ask("iter"))

    def __instancecheck__(self, instance: Any) -> bool:
        return self._remote.border.request("isinstance", instance, self) is True

    def __subclasscheck__(self, subclass: Any) -> bool:
        return self._remote.border.request("issubclass", subclass, self) is True

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._ask("deepcopy")

    def __enter__(self) -> Any:
        return self._ask("get", "__enter__")()

    def __exit__(self, *error: Any) -> Any:
        return self._ask("get", "__exit__")(*error[:2], None)


def raise_rank(found: Any, rank: int) -> Any:
    """A class's rank is that of its objects, and of what their operators give."""
    if type(found) is Remote:
        found._remote.rank = max(rank, found._remote.rank)
    return found


def _passed_on(name: str) -> Any:
    return lambda self, *arguments: self._ask(name, *arguments)


def _comparison(name: str) -> Any:
    def method(self: Remote, other: Any) -> Any:
        origin = self._remote
        if origin.border.is_reading:
            return NotImplemented
        if type(other) is Remote or origin.rank == DECLARED:
            found = self._ask(name, other)
            return found if type(found) is bool else NotImplemented
        content = self._ask("plain")
        return NotImplemented if content is NotImplemented else _OPERATIONS[name](content, other)

    return method


def _binary(name: str, *, is_reflected: bool) -> Any:
    def method(self: Remote, other: Any) -> Any:
        origin = self._remote
        if type(other) is not Remote and origin.rank < DECLARED:
            return NotImplemented
        operands = (other, self) if is_reflected else (self, other)
        return raise_rank(origin.border.request(name, *operands), origin.rank)

    return method


for _name in _METHODS:
    setattr(Remote, f"__{_name}__", _passed_on(_name))
for _name in _ORDER:
    setattr(Remote, f"__{_name}__", _comparison(_name))
for _name in _BINARY:
    setattr(Remote, f"__{_name.rstrip('_')}__", _binary(_name, is_reflected=False))
    setattr(Remote, f"__r{_name.rstrip('_')}__", _binary(_name, is_reflected=True))


class Printed(io.BytesIO):
    """What a program prints during one call, bounded."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > _MAX_PRINTED:
            raise OSError(f"printed more than {_MAX_PRINTED >> 10} KiB")
        return super().write(data)

    def take(self) -> str:
        text = self.getvalue().decode(errors="replace")
        self.seek(0)
        self.truncate()
        return text


class Border:
    """One end: sends requests, and serves those that come meanwhile. Both ends take turns, so data is never stale."""

    def __init__(
        self,
        reads: int,
        writes: int,
        perform: Callable[..., Any],
        *,
        rank: int = LOOSE,
        take_printed: Callable[[], str] = str,
    ) -> None:
        self.is_reading = False
        self._reads, self._writes = open(reads, "rb"), open(writes, "wb")  # noqa: SIM115
        self._perform, self._rank, self._take_printed = perform, rank, take_printed
        self.values = Values(self._export, self._import)
        self._depth = 0  # of calls in each other
        self._exported: list[Any] = []
        self._number_of: dict[int, int] = {}  # by id
        self._imported: dict[int, Any] = {}

    def request(self, operation: str, *arguments: Any) -> Any:
        if self.is_reading:  # `complex` of an answer's object would ask for its `__float__`
            raise ValueError("asked while a message is read")
        base = len(self.values.shared)
        self._send("ask", (operation, *arguments))
        self._depth += 1
        while True:
            before = len(self.values.shared)
            kind, value = self._receive()
            if kind != "ask":
                break
            self._serve(before, *value)
        self._leave(base, operation)
        if kind == "raise":
            raise value
        return value

    def serve(self) -> None:
        """One request from outside of any of our own."""
        before = len(self.values.shared)
        self._serve(before, *self._receive()[1])

    def _serve(self, base: int, operation: str, *arguments: Any) -> None:
        self._depth += 1
        try:
            self._send("return", self._perform(operation, *arguments))
        except Ended:
            raise
        except BaseException as error:
            try:
                self._send("raise", error)
            except Exception as other:
                names = type(error).__name__, type(other).__name__
                self._send("raise", RuntimeError("{} that cannot be passed on: {}".format(*names)))
        self._leave(base, operation)

    def _leave(self, base: int, operation: str) -> None:
        """Forget a call's containers. Those of objects' attributes stay a while: `node.children.append(...)`.

        Both ends must forget the same ones: they decide by the operation and by what is open on both.
        """
        self._depth -= 1
        shared, is_kept = self.values.shared, operation in ("get", "names")
        if is_kept and self._depth == 0:
            del shared[:-_KEPT_CONTAINERS]
        elif not is_kept or len(shared) > 4 * _KEPT_CONTAINERS:
            del shared[base:]

    def _send(self, kind: str, value: Any) -> None:
        before = len(self.values.shared)
        try:
            message = json.dumps([kind, *self.values.write(value), self._take_printed()]).encode()
            if len(message) > _MAX_MESSAGE:
                raise ValueError(f"got data of {len(message) >> 20} MiB, but at most {_MAX_MESSAGE >> 20} cross")
        except BaseException:
            del self.values.shared[before:]
            raise
        try:
            self._writes.write(len(message).to_bytes(8, "big") + message)
            self._writes.flush()
        except OSError as error:
            raise Ended(str(error)) from error

    def _receive(self) -> tuple[str, Any]:
        size = int.from_bytes(self._read(8), "big")
        if size > _MAX_MESSAGE:
            self._reads.close()
            raise Ended("sent too long a message")
        content = self._read(size)
        self.is_reading = True
        try:
            kind, head, contents, printed = json.loads(content)
            value = self.values.read(head, contents)
            if kind not in ("ask", "return") and not (kind == "raise" and isinstance(value, BaseException)):
                raise ValueError(kind)
            if printed:
                sys.stdout.write(printed)
        except Exception as error:
            self._reads.close()  # it ends for good, whatever the tests catch
            raise Ended(f"sent what is no data: {error!r:.100}") from error
        finally:
            self.is_reading = False
        return kind, value

    def _read(self, size: int) -> bytes:
        try:
            found = self._reads.read(size)
        except (OSError, ValueError) as error:  # ValueError: closed after a wrong message
            raise Ended(str(error)) from error
        if len(found) < size:
            raise Ended
        return found

    def _export(self, value: Any) -> list[Any]:
        """A number for an object that stays here, or its own if it is from there."""
        is_error = isinstance(value, BaseException)  # whose class may be from there
        origin = vars(value).get("_remote") if is_error else getattr(value, "_remote", None)
        if type(origin) is Origin and origin.border is self:
            return ["yours", origin.number]
        number = self._number_of.setdefault(id(value), len(self._exported))
        if number == len(self._exported):
            self._exported.append(value)
        try:
            hash_ = hash(value)
        except BaseException:
            hash_ = None
        if isinstance(value, type) and issubclass(value, BaseException):
            base = next(one for one in value.__mro__ if getattr(builtins, one.__name__, None) is one)
            return ["own error type", number, hash_, value.__name__, base.__name__]
        if is_error:
            return ["own error", number, hash_, self.values.write_part(type(value)), str(value)]
        return ["coroutine" if isinstance(value, types.CoroutineType) else "mine", number, hash_]

    def _import(self, kind: str, number: int, *more: Any) -> Any:
        if kind == "yours":
            return self._exported[number]
        if number not in self._imported:
            origin = Origin(border=self, number=number, rank=self._rank, hash=more[0])
            self._imported[number] = _IMPORTS[kind](origin, *more[1:])
        return self._imported[number]


def _import_error_type(origin: Origin, name: str, base: str) -> type[BaseException]:
    return type(str(name), (built_in_type(base, BaseException),), {"_remote": origin})


def _import_error(origin: Origin, kind: list[Any], text: str) -> BaseException:
    """An error whose attributes are asked for."""
    parent = origin.border.values.read_part(kind)
    if not issubclass(parent, BaseException):
        raise TypeError(kind)

    def get(error: BaseException, name: str) -> Any:
        return origin.border.request("get", error, name)

    own = {"args": property(lambda error: get(error, "args")), "__getattr__": get, "__str__": lambda _: str(text)}
    made: Any = type(parent.__name__, (parent,), own)
    error: BaseException = made.__new__(made)
    error.__dict__["_remote"] = origin
    return error


async def _import_coroutine(origin: Origin) -> Any:
    return origin.border.request("awaited", Remote(origin))


_IMPORTS: dict[str, Callable[..., Any]] = {
    "mine": Remote,
    "coroutine": _import_coroutine,
    "own error type": _import_error_type,
    "own error": _import_error,
}


def perform(operation: str, *arguments: Any) -> Any:
    """A request to an object of this side."""
    return _OPERATIONS[operation](*arguments)


def perform_for_answer(operation: str, *arguments: Any) -> Any:
    """What an answer may do with what a test gave it: call it, iterate, and use objects of the tests' own classes.

    Attributes of functions and generators lead to the tests' variables.
    """
    target, is_of_tests = arguments[0], type(arguments[0]).__module__ == "answer"
    match operation:
        case "call":
            is_allowed = not (isinstance(target, type) and is_built_in(target))
        case "get" | "set" | "delete":
            is_allowed = is_of_tests and not str(arguments[1]).startswith("_")
        case "iter" | "next" | "len" | "getitem":
            is_allowed = True
        case _:
            is_allowed = is_of_tests
    if not is_allowed:
        raise PermissionError(f"an answer may not {operation} what belongs to its tests")
    return perform(operation, *arguments)
