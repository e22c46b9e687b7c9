"""Values that parsers trip over: numbers at the edges of their types, odd strings, deep and repeated structures."""

from __future__ import annotations

import json
from random import Random
from typing import Any

INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 1000, 4096, 65_535, 65_536, 10**6),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**70, 10**400),
)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.0000001, -1.0, 1e-45, 1e-320, 1e-30, 1e10, 3.5e38, 1e308, 0.1)
NOT_FINITE = (float("nan"), float("inf"), float("-inf"))

# `outside` is a folder beside the model's: to open a file there is to leave the model's folder.
PATHS = (
    *("../outside/model.safetensors", "a/../../outside/model.safetensors", "./model.safetensors", "..", ".", "/"),
    *("{outside}/model.safetensors", "model.safetensors/", "/dev/zero", "/proc/self/mem", "\\\\host\\share"),
)
STRINGS = (
    *("", " ", "\n", "a\nb", "\r\nERROR forged line", "\x1b[2J\x1b]0;title\x07", "\x00", "\u202e", "\ufdd0", "😀", "▁"),
    *("{{ 7 * 7 }}", "%s%n", "<|im_end|>", "é" * 300, "x" * 70_000, "float32", "load", "os.system", "__class__"),
    *PATHS,
)


def integer(random: Random) -> int:
    """Of any size and sign; most are at the edge of a type."""
    value = random.choice(INTEGERS) + random.choice((0, 0, 0, 1, -1))
    return -value if random.random() < 0.2 else value


def number(random: Random) -> int | float:
    kind = random.random()
    if kind < 0.5:
        return integer(random)
    return random.choice(NOT_FINITE) if kind < 0.6 else random.choice(FLOATS) * random.choice((1, 1, -1))


def string(random: Random) -> str:
    return random.choice(STRINGS)


def nested(random: Random) -> Any:
    """Lists or objects in each other, deeper than a recursive reader can follow."""
    value: Any = 0
    for _ in range(random.choice((3, 50, 900))):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def json_value(random: Random) -> Any:
    makers = (
        *(number, number, number, integer, string, string, nested),
        *(lambda random: None, lambda random: random.random() < 0.5, lambda random: {}, lambda random: []),
        lambda random: [json_value(random) for _ in range(random.randrange(4))],
    )
    return random.choice(makers)(random)


def mutate_json(content: Any, random: Random, extra: dict[str, Any]) -> Any:
    """A JSON value with one place changed. `extra` holds fields that the reader knows and the value may lack."""
    if extra and isinstance(content, dict) and random.random() < 0.3:
        name = random.choice(list(extra))
        value = json.loads(json.dumps(random.choice(extra[name])))
        if isinstance(value, dict) and value and random.random() < 0.7:
            value = _change(value, random)
        return {**content, name: value}
    return _change(content, random)


def _change(content: Any, random: Random) -> Any:
    places = list(_places(content))
    if not places:
        return json_value(random)
    holder, key = random.choice(places)
    kind = random.random()
    if kind < 0.6:
        holder[key] = json_value(random)
    elif kind < 0.7:
        del holder[key]
    elif kind < 0.8:
        other, other_key = random.choice(places)
        if not _holds(holder[key], other) and not _holds(other[other_key], holder):
            holder[key], other[other_key] = other[other_key], holder[key]
    elif isinstance(holder, list):
        holder[key:key] = [holder[key]] * random.choice((1, 2, 30, 2000))
    else:
        holder[string(random) if random.random() < 0.5 else key + "s"] = holder[key]
    return content


def _holds(value: Any, part: Any) -> bool:
    return value is part or any(holder is part for holder, _ in _places(value))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every list and object with every index and key; long lists, such as a vocabulary, by a few of theirs."""
    places: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, dict | list):
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            for key in keys if len(keys) < 40 else [*keys[:4], *keys[-4:]]:
                places.append((holder, key))
                waiting.append(holder[key])
    return places


def json_bytes(content: Any, random: Random) -> bytes:
    """As a file; sometimes with a key twice, or nested deeper than `json.dumps` can write."""
    try:
        text = json.dumps(content)
    except RecursionError:
        text = '{"deep": ' + "[" * 3000 + "]" * 3000 + "}"
    kind = random.random()
    if kind < 0.03 and text.startswith("{"):
        text = '{"architectures": ["LlamaForCausalLM"], "hidden_size": 7, ' + text[1:]
    elif kind < 0.05:
        depth = random.choice((2_000, 200_000))
        text = text[:-1] + ', "deep": ' + "[" * depth + "]" * depth + text[-1:]
    elif kind < 0.06:
        text = text[:-1] + ', "long": ' + "9" * random.choice((400, 5_000, 300_000)) + text[-1:]
    return text.encode(errors="surrogatepass")
