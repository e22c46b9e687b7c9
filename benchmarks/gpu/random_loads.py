"""Random serving loads: chats that keep decoding, and long prompts that arrive beside them.

A load is plain data and depends on nothing but its seed and settings, so that a benchmark, a simulator and an engine
can all be given the same one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

NUM_CHATS = (8, 256)
CHAT_PROMPT_TOKENS = (100, 4_000)
CHAT_OUTPUT_TOKENS = (16, 1_200)
LONG_PROMPT_TOKENS = (2_000, 65_000)
LONG_OUTPUT_TOKENS = (1, 200)
OFFERED_PREFILL = (0.1, 2.0)  # long prompts' tokens per second, as a share of what the engine can prefill
BURST_SIZE = (2, 8)
TURNS = 4  # of a chat, before it starts over
LONGEST_PAUSE_S = 3.0
ARRIVALS = ("none", "steady", "steady", "random", "random", "bursts", "bursts")


@dataclass(frozen=True, slots=True)
class Turn:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt


@dataclass(frozen=True, slots=True)
class Client:
    """Sends its first request at `start_s` and each later one `pause_s` after the one before has ended."""

    start_s: float
    turns: tuple[Turn, ...]
    pause_s: float = 0.0
    repeats: bool = False  # starts over after the last turn

    def shorter(self, times: int) -> Client:
        turns = (Turn(max(2, t.prompt_tokens // times), max(2, t.output_tokens // times)) for t in self.turns)
        return replace(self, turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class Load:
    seed: int
    seconds: float  # then it is cut off
    arrivals: str  # of the long prompts
    chats: tuple[Client, ...]
    long_prompts: tuple[Client, ...]

    def scaled(self, fewer_chats: int, fewer_tokens: int) -> Load:
        """The same with fewer chats and shorter prompts and answers, for a slower machine or a smaller model."""
        chats, long_prompts = (
            tuple(client.shorter(fewer_tokens) for client in clients)
            for clients in (self.chats[::fewer_chats], self.long_prompts)
        )
        return replace(self, chats=chats, long_prompts=long_prompts)


def random_load(
    seed: int, seconds: float = 12.0, prefill_tokens_per_s: float = 25_000.0, max_chat_tokens: int = 400_000
) -> Load:
    """A load for an engine that prefills at about this rate and can hold `max_chat_tokens` of the chats' prompts."""
    rng = random.Random(seed)
    num_chats = _log_uniform(rng, *NUM_CHATS)
    shortest, longest = CHAT_PROMPT_TOKENS
    prompt_range = _sub_range(rng, shortest, min(longest, max_chat_tokens // num_chats))
    output_range = _sub_range(rng, *CHAT_OUTPUT_TOKENS)
    longest_start_s = rng.choice((0.0, rng.uniform(0.0, seconds / 2)))
    longest_pause_s = rng.choice((0.0, rng.uniform(0.0, LONGEST_PAUSE_S)))
    chats = tuple(
        Client(
            round(rng.uniform(0.0, longest_start_s), 3),
            tuple(Turn(_log_uniform(rng, *prompt_range), _log_uniform(rng, *output_range)) for _ in range(TURNS)),
            round(rng.uniform(0.0, longest_pause_s), 3),
            repeats=True,
        )
        for _ in range(num_chats)
    )
    arrivals = rng.choice(ARRIVALS)
    return Load(seed, seconds, arrivals, chats, _long_prompts(rng, arrivals, seconds, prefill_tokens_per_s))


def _long_prompts(rng: random.Random, arrivals: str, seconds: float, tokens_per_s: float) -> tuple[Client, ...]:
    if arrivals == "none":
        return ()
    size_range = _sub_range(rng, *LONG_PROMPT_TOKENS)
    low, high = OFFERED_PREFILL
    offered_tokens_per_s = tokens_per_s * math.exp(rng.uniform(math.log(low), math.log(high)))
    burst_size = rng.randint(*BURST_SIZE) if arrivals == "bursts" else 1
    found: list[Client] = []
    at_s = rng.uniform(0.0, seconds / 4)
    while at_s < seconds:
        sizes = [_log_uniform(rng, *size_range) for _ in range(burst_size)]
        found.extend(Client(round(at_s, 3), (Turn(size, _log_uniform(rng, *LONG_OUTPUT_TOKENS)),)) for size in sizes)
        mean_gap_s = sum(sizes) / offered_tokens_per_s
        at_s += rng.expovariate(1 / mean_gap_s) if arrivals == "random" else mean_gap_s
    return tuple(found)


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return min(high, max(low, round(math.exp(rng.uniform(math.log(low), math.log(high))))))


def _sub_range(rng: random.Random, low: int, high: int) -> tuple[int, int]:
    """A load's own range within the whole one: some loads have requests of one size, others of all sizes."""
    first, second = _log_uniform(rng, low, high), _log_uniform(rng, low, high)
    return min(first, second), max(first, second)


def load_from_json(content: Mapping[str, Any]) -> Load:
    """The inverse of `dataclasses.asdict`."""
    chats, long_prompts = (
        tuple(
            Client(**(client | {"turns": tuple(Turn(**turn) for turn in client["turns"])})) for client in content[name]
        )
        for name in ("chats", "long_prompts")
    )
    return Load(content["seed"], content["seconds"], content["arrivals"], chats, long_prompts)
