"""A GGUF file as parts that can be changed one by one, and written with any value in any place."""

from __future__ import annotations

import contextlib
import math
import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.fuzz.byte_mutations import Field, mutate_bytes
from tests.fuzz.hostile_values import NOT_FINITE, integer, number, string

STRING, ARRAY = 8, 9
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL = 4, 5, 6, 7
_TENSOR_TYPES = (*range(40), 255, 2**31, 2**32 - 1)


@dataclass
class Value:
    key: str
    kind: int
    content: Any
    item_kind: int = 0  # of an array


@dataclass
class Tensor:
    """`shape` as in the file, innermost dimension first. `offset` None: behind the tensor before it."""

    name: str
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class GgufParts:
    values: list[Value]
    tensors: list[Tensor]
    alignment: int = 32
    fields: list[Field] = field(default_factory=list)  # where the last `encode` put integers

    def copy(self) -> GgufParts:
        values = [Value(one.key, one.kind, one.content, one.item_kind) for one in self.values]
        tensors = [Tensor(one.name, list(one.shape), one.kind, one.data, one.offset) for one in self.tensors]
        return GgufParts(values, tensors, self.alignment)

    def encode(self) -> bytes:
        out, self.fields = bytearray(b"GGUF"), [(4, 4), (8, 8), (16, 8)]
        out += struct.pack("<IQQ", 3, len(self.tensors), len(self.values))
        for value in self.values:
            self._string(out, value.key)
            self._integer(out, 4, value.kind)
            self._content(out, value)
        offset = 0
        for tensor in self.tensors:
            self._string(out, tensor.name)
            self._integer(out, 4, len(tensor.shape))
            for size in tensor.shape:
                self._integer(out, 8, size)
            self._integer(out, 4, tensor.kind)
            self._integer(out, 8, offset if tensor.offset is None else tensor.offset)
            offset += -(-len(tensor.data) // self.alignment) * self.alignment
        for tensor in self.tensors:
            out += bytes(-len(out) % self.alignment) + tensor.data
        return bytes(out)

    def _content(self, out: bytearray, value: Value) -> None:
        if value.kind == STRING:
            self._string(out, value.content)
        elif value.kind == ARRAY:
            self._integer(out, 4, value.item_kind)
            self._integer(out, 8, len(value.content))
            if value.content:
                self._content(out, Value("", value.item_kind, value.content[0]))
            rest = value.content[1:]
            if rest and rest.count(rest[0]) == len(rest):  # millions of them, in a test
                out += _item(value.item_kind, rest[0]) * len(rest)
            else:
                out += b"".join(_item(value.item_kind, item) for item in rest)
        else:
            self.fields.append((len(out), struct.calcsize(CODES[value.kind])))
            out += _item(value.kind, value.content)

    def _integer(self, out: bytearray, size: int, value: int) -> None:
        self.fields.append((len(out), size))
        out += _wrapped(value, size)

    def _string(self, out: bytearray, text: str) -> None:
        self.fields.append((len(out), 8))
        out += _item(STRING, text)


def _item(kind: int, content: Any) -> bytes:
    if kind == STRING:
        text = content.encode(errors="surrogatepass")
        return struct.pack("<Q", len(text)) + text
    code = CODES[kind]
    if code in "fd":
        with contextlib.suppress(OverflowError):
            return struct.pack(f"<{code}", float(content))
        return struct.pack(f"<{code}", math.inf)
    return _wrapped(int(content), struct.calcsize(code))


def _wrapped(value: int, size: int) -> bytes:
    return (value % (1 << (8 * size))).to_bytes(size, "little")


def mutate_gguf(parts: GgufParts, random: Random, known: list[Value]) -> bytes:
    """A file with one to four changes to its parts, and sometimes one to its bytes. `known`: keys readers know."""
    parts = parts.copy()
    changes = random.choice((0, 1, 1, 2, 3, 5))
    for _ in range(changes):
        random.choice((_change_value, _change_value, _change_tensor, _change_tensor, _add_value))(parts, random, known)
    content = parts.encode()
    return mutate_bytes(content, random, parts.fields) if changes == 0 or random.random() < 0.2 else content


def _add_value(parts: GgufParts, random: Random, known: list[Value]) -> None:
    new = random.choice(known)
    parts.values = [value for value in parts.values if value.key != new.key or random.random() < 0.2]
    parts.values.append(Value(new.key, new.kind, _changed(new.content, random), new.item_kind))


def _change_value(parts: GgufParts, random: Random, _: list[Value]) -> None:
    if not parts.values:
        return
    place = random.randrange(len(parts.values))
    value = parts.values[place]
    kind = random.random()
    if kind < 0.6 and value.kind != ARRAY:
        value.content = _changed(value.content, random)
    elif kind < 0.6:
        value.content = _changed_list(list(value.content), random)
    elif kind < 0.7:
        del parts.values[place]
    elif kind < 0.8:
        parts.values.insert(random.randrange(len(parts.values)), value)
    elif kind < 0.9:
        value.key = random.choice((string(random), value.key + "\n", value.key.upper()))
    else:
        value.kind, value.content = UINT32, integer(random)


def _changed(content: Any, random: Random) -> Any:
    if isinstance(content, list):
        return _changed_list(list(content), random)
    if isinstance(content, bool):
        return random.randrange(256)
    if isinstance(content, int):
        return random.choice((integer(random), content + 1, content - 1, content * 2, content // 2))
    if isinstance(content, float):
        return number(random)
    return random.choice((string(random), content + "x", content[:-1], "default", "llama", "qwen2", "gpt2", "yarn"))


def _changed_list(items: list[Any], random: Random) -> list[Any]:
    kind = random.random()
    if not items or kind < 0.1:
        return []
    place = random.randrange(len(items))
    if kind < 0.6:
        items[place] = _changed(items[place], random)
    elif kind < 0.7:
        del items[place]
    elif kind < 0.85:
        items[place:place] = [items[place]] * random.choice((1, 3, 3000))
    else:
        random.shuffle(items)
    return items


def _change_tensor(parts: GgufParts, random: Random, _: list[Value]) -> None:
    if not parts.tensors:
        return
    place = random.randrange(len(parts.tensors))
    tensor = parts.tensors[place]
    kind = random.random()
    if kind < 0.25 and tensor.data:
        tensor.data = _damaged(tensor.data, random)
    elif kind < 0.4 and tensor.shape:
        tensor.shape[random.randrange(len(tensor.shape))] = integer(random)
    elif kind < 0.5:
        tensor.shape = random.choice((tensor.shape[::-1], [1, *tensor.shape], [*tensor.shape, 1], [], [1] * 5000))
    elif kind < 0.6:
        tensor.kind = random.choice(_TENSOR_TYPES)
    elif kind < 0.75:
        tensor.offset = random.choice((0, 1, 32, integer(random)))
    elif kind < 0.85:
        tensor.name = random.choice((string(random), random.choice(parts.tensors).name, "blk.0." + string(random)))
    elif kind < 0.92:
        del parts.tensors[place]
    else:
        parts.tensors.append(tensor)


def _damaged(data: bytes, random: Random) -> bytes:
    """Values or scales that are not finite, or noise."""
    damaged = bytearray(data)
    pattern = random.choice(
        (struct.pack("<f", random.choice((*NOT_FINITE, 3e38))), b"\x00\x7c", b"\x00\x7e", b"\xff\x7f", b"\x00", b"\xff")
    )
    if random.random() < 0.3:
        return pattern * (len(data) // len(pattern))
    start = random.randrange(0, len(data), 4)
    damaged[start : start + len(pattern)] = pattern
    return bytes(damaged[: len(data)])
