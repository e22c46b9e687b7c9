"""Agent traffic, generated or from a trace: conversations that share a long prefix and grow turn by turn, and misses.

A seed or a trace determines lengths and pauses. A nonce determines the tokens, so that no cache holds them from an
earlier round.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import shake_128
from itertools import count, islice
from pathlib import Path
from string import ascii_letters
from typing import Any, NamedTuple, Protocol, Self

from evenflow.errors import InvalidConfig, InvalidInput
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

TRACE_BLOCK_TOKENS = 512  # of a block id in Mooncake's traces
TRACE_REQUESTS, TRACE_MISS_TOKENS = 60, 16_000  # by default
_FIRST_ID = 64  # ids up to 115: plain tokens in nearly every vocabulary
_ID_OF_BYTE = bytes(_FIRST_ID + byte % len(ascii_letters) for byte in range(256))


class Segment(NamedTuple):
    """A part of a prompt. Segments of one name have the same tokens, up to the shorter one's end."""

    name: str
    num_tokens: int

    def token_ids(self, nonce: str) -> bytes:
        return shake_128(f"{nonce}/{self.name}".encode()).digest(self.num_tokens).translate(_ID_OF_BYTE)


@dataclass(frozen=True, slots=True)
class AgentRequest:
    prompt: tuple[Segment, ...]
    max_tokens: int
    pause: float  # seconds to wait after the session's previous answer, or after the round began
    is_miss: bool = False

    @property
    def num_tokens(self) -> int:
        """Of prompt and answer."""
        return sum(segment.num_tokens for segment in self.prompt) + self.max_tokens

    def token_ids(self, nonce: str) -> list[int]:
        return list(b"".join(segment.token_ids(nonce) for segment in self.prompt))

    def text(self, nonce: str) -> str:
        """A letter for each token, for servers that take text only: " q" is one token in nearly every vocabulary."""
        return "".join(f" {ascii_letters[token - _FIRST_ID]}" for token in self.token_ids(nonce))


Session = Iterator[AgentRequest]  # each request follows the answer to the one before


class Load(Protocol):
    """One round's requests, the same in every round."""

    @property
    def title(self) -> str: ...

    def settings(self) -> dict[str, Any]: ...

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer."""
        ...

    def scaled(self, scale: float) -> Self: ...

    def sessions(self) -> list[Session]:
        """The round ends with the last of their answers."""
        ...

    def background(self) -> list[Session]:
        """Sessions without an end. The first request of each fills the cache before the round begins."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsLoad:
    """Agents that take turns all the time, beside one session of cold prompts: the misses.

    A conversation starts anew when its own part is half as long as the prefix. In the history, tokens of the load's own
    stand for each answer: so all servers get the same prompts, and an answer counts as uncached.
    """

    num_agents: int = 6
    prefix_tokens: int = 16_000
    turn_tokens: int = 500  # added by each turn, on average
    answer_tokens: int = 120  # on average
    think_s: float = 2.0  # between an answer and the next turn, on average
    num_misses: int = 3
    miss_tokens: int = 50_000
    miss_pause_s: float = 5.0  # between a miss's answer and the next miss, on average
    seed: int = 0

    @property
    def title(self) -> str:
        return (
            f"{self.num_agents} agents with a prefix of {self.prefix_tokens} tokens and turns of about "
            f"{self.turn_tokens}, beside misses of {self.miss_tokens}"
        )

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def max_tokens(self) -> int:
        own = self._own_tokens + _most(self.turn_tokens)
        return max(self.prefix_tokens + own, self.miss_tokens) + _most(self.answer_tokens)

    @property
    def _own_tokens(self) -> int:
        return self.prefix_tokens // 2

    def scaled(self, scale: float) -> AgentsLoad:
        names = ("prefix_tokens", "turn_tokens", "answer_tokens", "miss_tokens")
        return replace(self, **{name: max(1, int(scale * getattr(self, name))) for name in names})

    def sessions(self) -> list[Session]:
        return [self._misses()]

    def _misses(self) -> Session:
        draw = random.Random(f"{self.seed}/misses")
        for number in range(self.num_misses):
            prompt = (Segment(f"miss {number}", self.miss_tokens),)
            pause = self.miss_pause_s * draw.uniform(0.5, 1.5)
            yield AgentRequest(prompt, _around(self.answer_tokens, draw), pause, is_miss=True)

    def background(self) -> list[Session]:
        """The agents, each at another stage of its first conversation."""
        num_turns = self._own_tokens // (self.turn_tokens + self.answer_tokens)
        starts = (agent * num_turns // self.num_agents for agent in range(self.num_agents))
        return [islice(self._turns(agent), start, None) for agent, start in enumerate(starts)]

    def _turns(self, agent: int) -> Session:
        draw = random.Random(f"{self.seed}/{agent}")
        for conversation in count():
            history: tuple[Segment, ...] = (Segment("prefix", self.prefix_tokens),)
            num_own = 0
            while num_own < self._own_tokens:
                name = f"agent {agent}, conversation {conversation}, token {num_own}"
                turn, answer = _around(self.turn_tokens, draw), _around(self.answer_tokens, draw)
                history += (Segment(name, turn),)
                yield AgentRequest(history, answer, draw.expovariate(1.0) * self.think_s)
                history += (Segment(f"{name}: answer", answer),)
                num_own += turn + answer


def _around(mean: int, draw: random.Random) -> int:
    return max(2, round(mean * draw.uniform(0.5, 1.5)))


def _most(mean: int) -> int:
    """The most that `_around` gives."""
    return max(2, round(1.5 * mean))


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests at a trace's times, with its lengths. Prompts with equal leading block ids have equal leading tokens."""

    path: Path
    requests: Sequence[TraceRequest]
    miss_tokens: int  # a prompt with at least this many tokens that no earlier one has is a miss
    speed: float = 1.0
    scale: float = 1.0

    @classmethod
    def read(
        cls, path: Path, num_requests: int = TRACE_REQUESTS, miss_tokens: int = TRACE_MISS_TOKENS, speed: float = 1.0
    ) -> TraceLoad:
        inputs = read_inputs(path, None, ReadTally())
        found = list(islice((one for one in inputs if isinstance(one, TraceRequest)), num_requests))
        if not found or any(one.arrival_s is None for one in found):
            raise InvalidInput(
                f"Got --trace {str(path)!r} but expected requests with token counts and times of arrival, "
                "such as timestamp, input_length, output_length and hash_ids."
            )
        return cls(path, found, miss_tokens, speed)

    @property
    def title(self) -> str:
        return (
            f"{len(self.requests)} requests of {self.path.name} at {self.speed:g}x speed and {self.scale:.3g}x length; "
            f"misses have {self.miss_tokens} uncached tokens or more"
        )

    def settings(self) -> dict[str, Any]:
        num_requests, path = len(self.requests), str(self.path)
        return {"trace": path, "requests": num_requests, "speed": self.speed, "miss_tokens": self.miss_tokens}

    @property
    def max_tokens(self) -> int:
        return max(request.num_tokens for [request] in self.sessions())

    def scaled(self, scale: float) -> TraceLoad:
        return replace(self, scale=scale, miss_tokens=max(1, int(scale * self.miss_tokens)))

    def background(self) -> list[Session]:
        return []

    def sessions(self) -> list[Session]:
        began = min(request.arrival_s or 0.0 for request in self.requests)
        seen: set[str] = set()
        found: list[Session] = []
        for number, request in enumerate(self.requests):
            prompt = self._prompt(number, request)
            num_new = sum(segment.num_tokens for segment in prompt if segment.name not in seen)
            seen.update(segment.name for segment in prompt)
            max_tokens = max(2, int(self.scale * (request.num_output_tokens or 0)))
            pause = ((request.arrival_s or 0.0) - began) / self.speed
            found.append(iter([AgentRequest(prompt, max_tokens, pause, is_miss=num_new >= self.miss_tokens)]))
        return found

    def _prompt(self, number: int, request: TraceRequest) -> tuple[Segment, ...]:
        end = max(1, int(self.scale * request.num_prompt_tokens))
        names = [f"block {block_id}" for block_id in request.block_ids] or [f"request {number}"]
        starts = [min(end, int(self.scale * TRACE_BLOCK_TOKENS * block)) for block in range(len(names))]
        return tuple(Segment(name, b - a) for name, a, b in zip(names, starts, [*starts[1:], end], strict=True))


def fit(load: Load, scale: float | None, max_model_len: int | None) -> tuple[Load, float]:
    """The load with its lengths scaled, and the scale: as given, else what the longest prompt needs to fit."""
    if scale is None:
        # Four tokens to spare, because an answer keeps at least two and lengths are rounded.
        scale = 1.0 if max_model_len is None else min(1.0, (max_model_len - 4) / load.max_tokens)
    scaled = load.scaled(scale)
    if max_model_len is not None and scaled.max_tokens > max_model_len:
        raise InvalidConfig(
            f"Got prompts and answers of up to {scaled.max_tokens} tokens with --scale {scale:.3g} but the context is "
            f"{max_model_len}: lower the scale."
        )
    return scaled, scale
