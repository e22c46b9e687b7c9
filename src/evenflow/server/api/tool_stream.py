"""Finds tool calls in a model's output while it is generated.

Reads one character at a time, so it does not matter how the text was split. Text that cannot be a call is passed on at
once; text that may become one is held back until that is certain.
"""

from __future__ import annotations

import json
import secrets
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from evenflow.model.text.chat_template import ToolStyle

_BLANK = " \t\r\n"
_END = "<end>"  # read after the last character; equals no character and is in no set of them
_MARKERS = {
    ToolStyle.HERMES: ("<tool_call>", "</tool_call>"),
    ToolStyle.LLAMA: ("<|python_tag|>", ""),
    ToolStyle.MISTRAL: ("[TOOL_CALLS]", ""),
}

_T = TypeVar("_T")
_Parser = Generator[None, str, _T]  # is sent characters and returns what they mean


def whole_message(delta: dict[str, Any]) -> dict[str, Any]:
    """The delta of a whole choice as an assistant message."""
    calls = [{name: value for name, value in call.items() if name != "index"} for call in delta.get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": delta.get("content", None if calls else "")}
    return {**message, "tool_calls": calls} if calls else message


class _NotACall(Exception):
    """The characters read since the attempt began are content after all."""


class ToolStream:
    """Parses one choice.

        stream = ToolStream(style, names={"get_weather"})
        deltas = [stream.push(text) for text in texts]
        last_delta = stream.push("", is_last=True)

    A call starts with the style's marker or, without one, at the very start of the output, where it must name a
    function in `names`. With `parallel` false only the first call is reported.
    """

    def __init__(self, style: ToolStyle, names: set[str], *, parallel: bool = True) -> None:
        self.num_calls = 0
        self._style = style
        self._opening, self._closing = _MARKERS[style]
        self._names = names
        self._parallel = parallel
        self._deltas: list[dict[str, Any]] = []  # to be returned next; texts and arguments are lists of pieces
        self._blanks = ""  # held until the next text: before a call they are dropped
        self._unread: deque[str] = deque()  # characters to read again
        self._read: list[str] = []  # since the attempt began
        self._is_at_start = True  # only blanks were read
        self._parser = self._output()
        next(self._parser)

    def push(self, text: str, is_last: bool = False) -> dict[str, Any]:
        """What became certain with this text, as one delta of OpenAI's chats, which loses the order."""
        deltas = self.push_in_order(text, is_last)
        if len(deltas) == 1:
            return deltas[0]
        contents = [delta["content"] for delta in deltas if "content" in delta]
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        whole: dict[str, Any] = {"content": "".join(contents)} if contents else {}
        return {**whole, "tool_calls": calls} if calls else whole

    def push_in_order(self, text: str, is_last: bool = False) -> list[dict[str, Any]]:
        """The same as deltas of either some content or one call, in the order in which the model wrote them."""
        for character in text:
            self._parser.send(character)
        if is_last:
            with suppress(StopIteration):  # the parser ends with the output
                self._parser.send(_END)
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            if "content" in delta:
                delta["content"] = "".join(delta["content"])
            else:
                [call] = delta["tool_calls"]
                call["function"]["arguments"] = "".join(call["function"]["arguments"])
        return deltas

    # ---- parsers: each is sent characters through `yield` ----

    def _output(self) -> _Parser[None]:
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

    def _try_calls(self, first: str) -> _Parser[bool]:
        """Read calls, or their closing marker; False if nothing was read."""
        if self.num_calls and first == self._closing[:1] and (yield from self._attempt(self._closing_marker())):
            return True
        if first == self._opening[0] and (yield from self._attempt(self._marked_calls())):
            return True
        if first in "{[" and self._is_at_start:
            return (yield from self._attempt(self._calls(is_marked=False)))
        return False

    def _attempt(self, parser: _Parser[None]) -> _Parser[bool]:
        """Whether the parser succeeds; if not, its characters are read again."""
        self._read.clear()
        try:
            yield from parser
        except _NotACall:
            self._unread.extendleft(reversed(self._read))
            return False
        return True

    def _marked_calls(self) -> _Parser[None]:
        yield from self._word(self._opening)
        yield from self._calls(is_marked=True)

    def _closing_marker(self) -> _Parser[None]:
        yield from self._word(self._closing)
        yield from self._next_visible()
        self._back()
        self._blanks = ""

    def _calls(self, is_marked: bool) -> _Parser[None]:
        """One call or several, in a list or one after the other."""
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

    def _call(self, is_marked: bool) -> _Parser[None]:
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
            self._back()  # the call was reported already: it ends before what is not JSON
        if call.name is None:
            raise _NotACall
        if call.index is None:
            self._start(call)
            self._emit_arguments(call, call.arguments or "{}")

    def _member(self, key: str, call: _Call, is_marked: bool) -> _Parser[None]:
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

    def _value(self, first: str, call: _Call) -> _Parser[str]:
        """A JSON value as written, or the content of a string. Emitted if the call has started."""
        if first in ("{", "["):
            return (yield from self._nested(first, call))
        value = (yield from self._string()) if first == '"' else (yield from self._literal(first))
        self._emit_arguments(call, value)
        return value

    def _nested(self, first: str, call: _Call) -> _Parser[str]:
        """An object or a list, emitted as it comes."""
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

    def _literal(self, first: str) -> _Parser[str]:
        """A number, true, false or null; null means no arguments."""
        text, character = "", first
        while character.isalnum() or character in "+-.":
            text += character
            character = yield from self._next()
        self._back()
        if not text:
            raise _NotACall
        return "{}" if text == "null" else text

    def _string(self) -> _Parser[str]:
        """The rest of a string after its opening quote."""
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

    def _visible(self, expected: str) -> _Parser[str]:
        """The next character that is not blank, which must be one of `expected`."""
        character = yield from self._next_visible()
        if character not in expected:
            raise _NotACall
        return character

    def _word(self, word: str) -> _Parser[None]:
        for expected in word:
            if (yield from self._next()) != expected:
                raise _NotACall

    def _next_visible(self, also_skipped: str = "") -> _Parser[str]:
        while True:
            character = yield from self._next()
            if character not in _BLANK + also_skipped:
                return character

    def _next(self) -> _Parser[str]:
        character = self._unread.popleft() if self._unread else (yield)
        self._read.append(character)
        return character

    def _back(self) -> None:
        self._unread.appendleft(self._read.pop())

    # ---- the next deltas ----

    def _start(self, call: _Call) -> None:
        call.index, self.num_calls = self.num_calls, self.num_calls + 1
        self._blanks = ""
        if self._parallel or call.index == 0:
            # Mistral's templates accept only ids of nine letters and digits.
            call_id = secrets.token_hex(5)[:9] if self._style is ToolStyle.MISTRAL else f"call_{secrets.token_hex(12)}"
            delta: dict[str, Any] = {"index": call.index, "id": call_id, "type": "function"}
            delta["function"] = {"name": call.name, "arguments": []}
            self._deltas.append({"tool_calls": [delta]})

    def _emit_arguments(self, call: _Call, text: str) -> None:
        if call.index is not None and (self._parallel or call.index == 0):
            if not self._deltas or "tool_calls" not in self._deltas[-1]:
                self._deltas.append({"tool_calls": [{"index": call.index, "function": {"arguments": []}}]})
            self._deltas[-1]["tool_calls"][0]["function"]["arguments"].append(text)

    def _emit_content(self, text: str) -> None:
        if self._blanks + text:
            if not self._deltas or "content" not in self._deltas[-1]:
                self._deltas.append({"content": []})
            self._deltas[-1]["content"].append(self._blanks + text)
        self._blanks = ""


@dataclass(slots=True)
class _Call:
    """A call being parsed."""

    name: str | None = None
    arguments: str | None = None
    index: int | None = None  # None until it has started
