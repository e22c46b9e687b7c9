"""Changes to a file that know nothing of its format, or only where its integers are."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random

from tests.fuzz.hostile_values import integer

Field = tuple[int, int]  # the position of an integer in a file, and its bytes


def mutate_bytes(content: bytes, random: Random, fields: Sequence[Field] = ()) -> bytes:
    """The content with one change; half of them to a field, where there are any."""
    data = bytearray(content)
    if fields and random.random() < 0.5:
        return _set_field(data, random, *random.choice(fields))
    change = random.choice((_flip_bits, _set_integer, _truncate, _cut_out, _repeat, _insert, _overwrite, _swap))
    change(data, random)
    return bytes(data)


def set_value(data: bytearray, position: int, size: int, value: int) -> None:
    data[position : position + size] = (value % (1 << (8 * size))).to_bytes(size, "little")


def _set_field(data: bytearray, random: Random, position: int, size: int) -> bytes:
    old = int.from_bytes(data[position : position + size], "little")
    near = old + random.choice((-1, 1, 8, -8, 32, 1 << 20, old, len(data)))
    set_value(data, position, size, random.choice((near, len(data) - position, integer(random), integer(random))))
    return bytes(data)


def _place(data: bytearray, random: Random) -> int:
    """Anywhere; half of them near the start, where headers are."""
    return random.randrange(max(1, min(len(data), 600 if random.random() < 0.5 else len(data))))


def _flip_bits(data: bytearray, random: Random) -> None:
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        if data:
            data[_place(data, random)] ^= 1 << random.randrange(8)


def _set_integer(data: bytearray, random: Random) -> None:
    set_value(data, _place(data, random), random.choice((1, 2, 4, 8)), integer(random))


def _truncate(data: bytearray, random: Random) -> None:
    del data[_place(data, random) :]


def _cut_out(data: bytearray, random: Random) -> None:
    start = _place(data, random)
    del data[start : start + random.choice((1, 2, 4, 8, 32, 1000))]


def _repeat(data: bytearray, random: Random) -> None:
    start = _place(data, random)
    part = data[start : start + random.choice((1, 8, 40, 300))]
    data[start:start] = part * random.choice((1, 2, 100))


def _insert(data: bytearray, random: Random) -> None:
    start = _place(data, random)
    data[start:start] = random.randbytes(random.choice((1, 4, 8, 100)))


def _overwrite(data: bytearray, random: Random) -> None:
    """With numbers that are not finite, zeros, ones or noise."""
    start = _place(data, random)
    special = struct.pack("<f", random.choice((float("nan"), float("inf"), -float("inf"), 3e38)))
    filling = random.choice((special, b"\x00\x7c", b"\x00\xfe", b"\x00", b"\xff", random.randbytes(7)))
    size = random.choice((4, 64, 4096))
    data[start : start + size] = (filling * size)[: min(size, len(data) - start)]


def _swap(data: bytearray, random: Random) -> None:
    size, first, second = random.choice((1, 8, 64)), _place(data, random), _place(data, random)
    one, other = data[first : first + size], data[second : second + size]
    if abs(first - second) >= size and len(one) == len(other):
        data[first : first + size], data[second : second + size] = other, one
