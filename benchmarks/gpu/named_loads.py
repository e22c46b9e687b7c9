"""Loads by name, for benchmarks that run several on one engine.

| name | load |
|---|---|
| `32k` | 64 chats (1,024 tokens in, 1,000 out); after 3 s, six prompts of 32,768 tokens, one every 1.5 s |
| `65k` | the same chats beside three prompts of 65,536 tokens, one every 4 s |
| `60k` | one prompt of 60,000 tokens, and a short one every quarter of a second |
| `chats` | the chats alone |
| `decode:STREAMS` | streams (1,024 tokens in, 160 out, again and again): their median gap is a step of decodes |
| `prefill:TOKENS` | five prompts one after the other, each alone: their TTFT is a prefill |
| `random:SEED`, `random:SEED:SECONDS` | drawn by `random_loads.random_load` |
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from random_loads import Client, Load, Turn, random_load

NAMES = "32k, 65k, 60k, chats, decode:STREAMS, prefill:TOKENS, random:SEED, random:SEED:SECONDS"
_LONGEST_S = 90.0  # of a load that ends with its answers
_NEVER = 1e6


@dataclass(frozen=True, slots=True)
class NamedLoad:
    name: str
    load: Load
    ends_with_answers: bool = True  # once every long prompt has its answer; else after its seconds

    def scaled(self, fewer_chats: int, fewer_tokens: int) -> NamedLoad:
        return replace(self, load=self.load.scaled(fewer_chats, fewer_tokens))


def named_load(name: str) -> NamedLoad:
    """ValueError if there is none of this name."""
    kind, *values = name.split(":")
    try:
        return _load(name, kind, values)
    except ValueError:
        raise ValueError(f"Got load {name!r} but expected one of {NAMES}, with numbers above 0.") from None


def _load(name: str, kind: str, values: list[str]) -> NamedLoad:
    chats = tuple(Client(0.0, (Turn(1024, 1000),), repeats=True) for _ in range(64))
    match kind, values:
        case "32k", []:
            return _steady(name, chats, [Client(3.0 + 1.5 * number, (Turn(32_768, 2),)) for number in range(6)])
        case "65k", []:
            return _steady(name, chats, [Client(3.0 + 4.0 * number, (Turn(65_536, 2),)) for number in range(3)])
        case "60k", []:
            sizes = ((n, 200 + 97 * n % 800) for n in range(24))
            short = tuple(Client(0.25 * n, (Turn(size, 64),), _NEVER, repeats=True) for n, size in sizes)
            return _steady(name, short, [Client(0.5, (Turn(60_000, 2),))])
        case "chats", []:
            return NamedLoad(name, Load(0, 6.0, "none", chats, ()), ends_with_answers=False)
        case "decode", [number]:
            streams = tuple(Client(0.0, (Turn(1024, 160),), repeats=True) for _ in range(_positive(number)))
            return NamedLoad(name, Load(0, 3.0 + len(streams) / 40, "none", streams, ()), ends_with_answers=False)
        case "prefill", [tokens]:
            size = _positive(tokens)
            apart = 0.2 + size / 20_000
            return _steady(name, (), [Client(apart * number, (Turn(size, 2),)) for number in range(5)])
        case "random", [seed]:
            return NamedLoad(name, random_load(int(seed)), ends_with_answers=False)
        case "random", [seed, seconds]:
            return NamedLoad(name, random_load(int(seed), _positive(seconds)), ends_with_answers=False)
    raise ValueError


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ValueError
    return number


def _steady(name: str, chats: tuple[Client, ...], long_prompts: list[Client]) -> NamedLoad:
    return NamedLoad(name, Load(0, _LONGEST_S, "steady", chats, tuple(long_prompts)))
