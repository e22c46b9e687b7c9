"""Finds calls of functions in a model's answer while it is being written.

Reads one character at a time, so that how the text was cut cannot matter. What cannot be a call is passed on at once;
what may become one is held until that is certain. Must not know: models, HTTP.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from evenflow.model.chat_template import ToolStyle

_BLANK = " \t\r\n"
_END = ""  # what is read behind the last character
_MARKS = {
    ToolStyle.HERMES: ("<tool_call>", "</tool_call>"),
    ToolStyle.LLAMA: ("<|python_tag|>", ""),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]", ""),
}

_T = TypeVar("_T")
_Reading = Generator[None, str, _T]  # is sent characters, and returns what they meant


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are JSON as the model wrote it."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


def as_delta(events: Iterable[Event]) -> dict[str, Any]:
    """These events as one delta of OpenAI's streams."""
    content = ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                content += text
            case CallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    delta: dict[str, Any] = {"content": content} if content else {}
    return {**delta, "tool_calls": list(calls.values())} if calls else delta


def whole_message(events: Iterable[Event]) -> dict[str, Any]:
    """All events of an answer as one message of the assistant."""
    delta = as_delta(events)
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    return {**message, "tool_calls": calls} if calls else message


class _NotACall(Exception):
    """What was read since the last mark is text after all."""


class ToolStream:
    """The events of one answer.

        stream = ToolStream(style, names={"get_weather"})
        for piece in pieces:
            for event in stream.push(piece): ...
        for event in stream.finish(): ...

    A call is recognised by the style's mark, or without a mark at the very start of the answer, where it must name a
    function in `names`. With `parallel` false only the first call is reported.
    """

    def __init__(self, style: ToolStyle, names: set[str], *, parallel: bool = True) -> None:
        self.num_calls = 0
        self._opening, self._closing = _MARKS[style]
        self._names = names
        self._most_calls = None if parallel else 1
        self._new_id = _short_id if style is ToolStyle.MISTRAL else _long_id
        self._events: list[Event] = []
        self._blanks = ""  # read, and passed on with the next text: before a call they mean nothing
        self._again: deque[str] = deque()  # characters to be read once more
        self._read: list[str] = []  # since the last mark
        self._is_at_start = True  # nothing but blanks was read
        self._reading = self._answer()
        next(self._reading)

    def push(self, text: str) -> list[Event]:
        """What has become certain with this piece."""
        for character in text:
            self._reading.send(character)
        return self._take_events()

    def finish(self) -> list[Event]:
        """What was held, now that nothing follows."""
        try:
            self._reading.send(_END)
        except StopIteration:
            return self._take_events()
        raise AssertionError("the reading of an answer went on behind its end")

    def _take_events(self) -> list[Event]:
        taken: list[Event] = []
        for event in self._events:
            last = taken[-1] if taken else None
            if isinstance(event, Content) and isinstance(last, Content):
                taken[-1] = Content(last.text + event.text)
            elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
                taken[-1] = CallArguments(last.index, last.text + event.text)
            else:
                taken.append(event)
        self._events.clear()
        return taken

    # ---- reading: each of these is sent characters through `yield` ----

    def _answer(self) -> _Reading[None]:
        while True:
            self._read.clear()
            character = yield from self._next()
            if character == _END:
                if not self.num_calls:
                    self._emit_content("")
                return
            if character in _BLANK:
                self._blanks += character
                continue
            self._back()
            if not (yield from self._try_calls(character)):
                self._emit_content((yield from self._next()))
            self._is_at_start = False

    def _try_calls(self, first: str) -> _Reading[bool]:
        """Read calls, or a mark that closes them; False: nothing was read."""
        if self.num_calls and first == self._closing[:1] and (yield from self._attempt(self._closing_mark())):
            return True
        if first == self._opening[0] and (yield from self._attempt(self._marked_calls())):
            return True
        if first in "{[" and self._is_at_start:
            return (yield from self._attempt(self._calls(is_marked=False)))
        return False

    def _attempt(self, reading: _Reading[None]) -> _Reading[bool]:
        """Whether it could be read; if not, all of it is to be read again."""
        self._read.clear()
        try:
            yield from reading
        except _NotACall:
            self._again.extendleft(reversed(self._read))
            return False
        return True

    def _marked_calls(self) -> _Reading[None]:
        yield from self._word(self._opening)
        yield from self._calls(is_marked=True)

    def _closing_mark(self) -> _Reading[None]:
        yield from self._word(self._closing)
        yield from self._next_visible()
        self._back()
        self._blanks = ""

    def _calls(self, is_marked: bool) -> _Reading[None]:
        """One call, or several: in a list, or one behind the other."""
        is_list = (yield from self._next_visible()) == "["
        if not is_list:
            self._back()
        yield from self._call(is_marked)
        while True:
            following = yield from self._next_visible(also_skipped=",;")
            self._back()
            if following != "{" or not (yield from self._attempt(self._call(is_marked))):
                break
        if is_list and following == "]":
            yield from self._next()

    def _call(self, is_marked: bool) -> _Reading[None]:
        yield from self._visible("{")
        call = _Call()
        try:
            while True:
                yield from self._visible('"')
                key = yield from self._string()
                yield from self._visible(":")
                yield from self._member(key, call, is_marked)
                if (yield from self._visible(",}")) == "}":
                    break
        except _NotACall:
            if call.index is None:
                raise
            self._back()  # what was said of a call stays said: it ends before what is no JSON
        if call.name is None:
            raise _NotACall
        if call.index is None:
            self._start(call)
            self._emit_arguments(call, call.arguments or "{}")

    def _member(self, key: str, call: _Call, is_marked: bool) -> _Reading[None]:
        first = yield from self._next_visible()
        if key == "name" and call.name is None and first == '"':
            call.name = yield from self._string()
            if not is_marked and call.name not in self._names:
                raise _NotACall
        elif key in ("arguments", "parameters") and call.arguments is None:
            if call.name is not None:
                self._start(call)
            call.arguments = yield from self._value(first, call)
        elif is_marked or key in ("type", "id"):
            yield from self._value(first, _Call())
        else:
            raise _NotACall

    def _value(self, first: str, call: _Call) -> _Reading[str]:
        """A JSON value as it is written; of one that is a text, what it says. Given to the call where it has begun."""
        if first in ("{", "["):
            return (yield from self._nested(first, call))
        value = (yield from self._string()) if first == '"' else (yield from self._literal(first))
        self._emit_arguments(call, value)
        return value

    def _nested(self, first: str, call: _Call) -> _Reading[str]:
        """An object or a list, passed on as it comes."""
        text, depth, in_string, escaped = [first], 1, False, False
        self._emit_arguments(call, first)
        while depth:
            character = yield from self._next()
            if character == _END:
                raise _NotACall
            text.append(character)
            self._emit_arguments(call, character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            else:
                in_string = character == '"'
                depth += (character in "{[") - (character in "}]")
        return "".join(text)

    def _literal(self, first: str) -> _Reading[str]:
        """A number or one of JSON's words; null is no arguments."""
        text, character = "", first
        while character.isalnum() or (character and character in "+-."):
            text += character
            character = yield from self._next()
        self._back()
        if not text:
            raise _NotACall
        return "{}" if text == "null" else text

    def _string(self) -> _Reading[str]:
        """What follows an opening quote, up to the closing one."""
        text, escaped = "", False
        while (character := (yield from self._next())) != '"' or escaped:
            if character == _END:
                raise _NotACall
            escaped = character == "\\" and not escaped
            text += character
        try:
            return str(json.loads(f'"{text}"', strict=False))
        except ValueError:
            raise _NotACall from None

    def _visible(self, expected: str) -> _Reading[str]:
        """The next character that is no blank, which must be one of these."""
        character = yield from self._next_visible()
        if character == _END or character not in expected:
            raise _NotACall
        return character

    def _word(self, word: str) -> _Reading[None]:
        for expected in word:
            if (yield from self._next()) != expected:
                raise _NotACall

    def _next_visible(self, also_skipped: str = "") -> _Reading[str]:
        while True:
            character = yield from self._next()
            if character == _END or character not in _BLANK + also_skipped:
                return character

    def _next(self) -> _Reading[str]:
        character = self._again.popleft() if self._again else (yield)
        self._read.append(character)
        return character

    def _back(self) -> None:
        self._again.appendleft(self._read.pop())

    # ---- events ----

    def _start(self, call: _Call) -> None:
        assert call.name is not None
        call.index, self.num_calls = self.num_calls, self.num_calls + 1
        self._blanks = ""
        if self._reports(call.index):
            self._events.append(CallStart(call.index, self._new_id(), call.name))

    def _emit_arguments(self, call: _Call, text: str) -> None:
        if call.index is not None and self._reports(call.index):
            self._events.append(CallArguments(call.index, text))

    def _reports(self, index: int) -> bool:
        return self._most_calls is None or index < self._most_calls

    def _emit_content(self, text: str) -> None:
        if self._blanks + text:
            self._events.append(Content(self._blanks + text))
        self._blanks = ""


@dataclass(slots=True)
class _Call:
    """A call while it is read."""

    name: str | None = None
    arguments: str | None = None
    index: int | None = None  # None: nothing of it was reported


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    """Mistral's templates take ids of nine letters and digits only."""
    return secrets.token_hex(5)[:9]
