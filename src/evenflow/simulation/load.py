"""What a simulation serves: requests replayed from a trace, or drawn at random with given or fitted figures.

Token ids stand for content: equal leading blocks of a trace become equal leading tokens, so that the real prefix cache
finds what the trace shares. Knows nothing about engines and devices.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, pairwise, repeat
from pathlib import Path
from statistics import fmean, pstdev

from evenflow.advisor.token_counts import EstimatedTokens
from evenflow.errors import InvalidInput
from evenflow.workload.inputs import ChatInput, Input, TextInput, TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

ANSWER_TOKEN = 1  # every token that a simulated engine samples
_ESTIMATED = EstimatedTokens()
_MAX_TOKENS = 1 << 22  # of a prompt and its answer: no model takes more
_UNIQUE, _BLOCKS = 1 << 30, 2  # first ids: of prompts that share nothing, and of blocks


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. Its prompt is runs of equal tokens, as (token, length)."""

    id: str
    prompt: tuple[tuple[int, int], ...]
    num_output_tokens: int
    arrival_s: float | None = None  # None: `delay_s` after the answer to the one before it in its session
    delay_s: float = 0.0
    session: str = ""
    tenant: str = ""
    service_class: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(length for _, length in self.prompt)

    def token_ids(self) -> list[int]:
        return list(chain.from_iterable(repeat(token, length) for token, length in self.prompt))


@dataclass(frozen=True, slots=True)
class Load:
    """Requests in order of arrival; those of a session in their order, each with its `arrival_s` or after the last."""

    name: str
    requests: Sequence[LoadRequest]
    left_out: Mapping[str, int] = field(default_factory=dict)  # records that could not be used, by reason
    until: float = math.inf  # then it is cut off

    @property
    def seconds(self) -> float:
        """Until the last arrival that is known beforehand."""
        return max((one.arrival_s or 0.0 for one in self.requests), default=0.0)

    def faster(self, times: float) -> Load:
        """The same requests in less time. Pauses in sessions stay."""
        sped = [
            one if one.arrival_s is None else replace(one, arrival_s=one.arrival_s / times) for one in self.requests
        ]
        return replace(self, requests=sped)

    def first(self, count: int) -> Load:
        """The first ones to arrive, with what follows them in their sessions."""
        begun = [one for one in self.requests if one.arrival_s is not None][:count]
        names, sessions = {one.id for one in begun}, {one.session for one in begun if one.session}
        kept = [one for one in self.requests if one.id in names or (one.arrival_s is None and one.session in sessions)]
        return replace(self, requests=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What to change about a trace."""

    limit: int | None = None
    speed: float = 1.0
    rate: float | None = None  # requests a second, at random instead of the trace's times
    burstiness: float = 1.0  # of drawn arrivals: squared coefficient of variation of the pauses; 1: Poisson
    default_output: int | None = None  # of requests that do not say


def read_load(path: Path, settings: LoadSettings, seed: int = 0) -> Load:
    """A trace's requests; InvalidInput if it holds none that can be simulated."""
    tally = ReadTally()
    requests: list[LoadRequest] = []
    tokens = _Tokens()
    left_out: Counter[str] = Counter()
    for number, item in enumerate(islice(read_inputs(path, None, tally), settings.limit)):
        for one in _requests_of(item, number, tokens, settings.default_output):
            if one.num_output_tokens < 1:
                left_out["an answer of 0 tokens"] += 1
            elif one.num_prompt_tokens + one.num_output_tokens > _MAX_TOKENS:
                left_out[f"a request of more than {_MAX_TOKENS:,} tokens"] += 1
            else:
                requests.append(one)
    left_out.update(tally.unusable)
    if not requests:
        why = "; ".join(f"{count:,} x {what}" for what, count in left_out.most_common(3)) or "it is empty"
        raise InvalidInput(f"Got {str(path)!r} but it holds no request that can be simulated: {why}.")
    return Load(path.name, _timed(requests, settings, str(path), seed), dict(left_out))


def _timed(requests: list[LoadRequest], settings: LoadSettings, path: str, seed: int) -> list[LoadRequest]:
    """With times from 0 on, in order."""
    first_of_session = _starts(requests)
    if settings.rate is not None:
        times = _arrivals(random.Random(seed), settings.rate, settings.burstiness)
        return [
            replace(one, arrival_s=next(times)) if number in first_of_session else replace(one, arrival_s=None)
            for number, one in enumerate(requests)
        ]
    if any(requests[number].arrival_s is None for number in first_of_session):
        raise InvalidInput(f"Got {path!r} without times of arrival: give --rate, in requests a second.")
    known = [one.arrival_s for one in requests if one.arrival_s is not None]
    began = min(known)
    timed = [
        one if one.arrival_s is None else replace(one, arrival_s=(one.arrival_s - began) / settings.speed)
        for one in requests
    ]
    return sorted(timed, key=lambda one: -1.0 if one.arrival_s is None else one.arrival_s)


def _starts(requests: Sequence[LoadRequest]) -> set[int]:
    """Requests that follow no other: all without a session, and the first of each."""
    seen: set[str] = set()
    found: set[int] = set()
    for number, one in enumerate(requests):
        if not one.session or one.session not in seen:
            found.add(number)
        seen.add(one.session)
    return found


class _Tokens:
    """Token ids of contents."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._unique = count(_UNIQUE)

    def unique(self) -> int:
        return next(self._unique)

    def of_block(self, block: int) -> int:
        return self._blocks.setdefault(block, _BLOCKS + len(self._blocks))


def _requests_of(item: Input, number: int, tokens: _Tokens, default_output: int | None) -> Iterator[LoadRequest]:
    if isinstance(item, TraceRequest):
        output = item.num_output_tokens if item.num_output_tokens is not None else default_output
        if output is None:
            raise InvalidInput(f"Got request {number + 1} without the length of its answer: give --output-tokens.")
        follows = item.session and item.arrival_s is None and item.delay_s is not None
        yield LoadRequest(
            id=f"r{number}",
            prompt=_prompt(item, tokens),
            num_output_tokens=output,
            arrival_s=None if follows else item.arrival_s,
            delay_s=item.delay_s or 0.0,
            session=item.session,
            tenant=item.tenant,
            service_class=item.service_class,
        )
    elif isinstance(item, TextInput):
        if default_output is None:
            raise InvalidInput("Got texts without answers: give --output-tokens.")
        yield LoadRequest(f"r{number}", ((tokens.unique(), max(1, _ESTIMATED.count(item))),), default_output)
    else:
        yield from _turns(item, number, tokens, default_output)


def _prompt(item: TraceRequest, tokens: _Tokens) -> tuple[tuple[int, int], ...]:
    left, runs = item.num_prompt_tokens, list[tuple[int, int]]()
    for block in item.block_ids:
        if left <= 0:
            break
        runs.append((tokens.of_block(block), min(left, item.block_tokens)))
        left -= item.block_tokens
    if left > 0:
        runs.append((tokens.unique(), left))
    return tuple(runs)


def _turns(chat: ChatInput, number: int, tokens: _Tokens, default_output: int | None) -> Iterator[LoadRequest]:
    """A conversation: a request for each answer in it, which starts with all that was said before."""
    prompt: list[tuple[int, int]] = []
    messages = [*chat.messages, *([{"role": "assistant", "content": chat.answer}] if chat.answer else [])]
    has_answers = any(message["role"] == "assistant" for message in messages)
    for turn, message in enumerate(messages):
        length = max(1, _ESTIMATED.count(TextInput(message["content"] or " ")))
        if message["role"] == "assistant" and prompt:
            yield LoadRequest(f"r{number}.{turn}", tuple(prompt), length, session=f"c{number}")
            prompt.append((ANSWER_TOKEN, length))
        else:
            prompt.append((tokens.unique(), length))
    if not has_answers and prompt:
        if default_output is None:
            raise InvalidInput("Got conversations without answers: give --output-tokens.")
        yield LoadRequest(f"r{number}", tuple(prompt), default_output)


# ---- drawn ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lognormal, with this median and this spread (the standard deviation of the logarithm)."""

    median: float
    spread: float = 0.0

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        median, _, spread = text.partition(":")
        try:
            found = cls(median=float(median), spread=float(spread or 0))
        except ValueError:
            found = cls(median=math.nan)
        if not (1 <= found.median <= 1e7 and 0 <= found.spread <= 5):
            raise InvalidInput(
                f"Got {flag} {text!r} but expected a median of tokens >= 1 and a spread, such as 800:1.2."
            )
        return found

    def draw(self, rng: random.Random) -> int:
        return max(1, min(_MAX_TOKENS // 2, round(self.median * math.exp(rng.gauss(0.0, self.spread)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """How to draw a load: its arrivals are a gamma process."""

    name: str
    num_requests: int
    rate: float
    burstiness: float
    lengths: Callable[[random.Random], tuple[int, int]]  # of a prompt and its answer

    @classmethod
    def fitted(cls, load: Load, num_requests: int | None = None, rate: float | None = None) -> Synthetic:
        """Like this trace: its pairs of lengths, its rate, and its burstiness. What prompts share is not kept."""
        times = sorted(one.arrival_s for one in load.requests if one.arrival_s is not None)
        pauses = [after - before for before, after in pairwise(times)]
        mean = fmean(pauses) if pauses else 0.0
        if not mean:
            raise InvalidInput(f"Got {load.name!r} to fit but its requests do not arrive one after the other.")
        pairs = [(one.num_prompt_tokens, one.num_output_tokens) for one in load.requests]
        return cls(
            name=f"like {load.name}",
            num_requests=num_requests or len(load.requests),
            rate=rate or 1 / mean,
            burstiness=max(0.01, (pstdev(pauses) / mean) ** 2),
            lengths=lambda rng: rng.choice(pairs),
        )

    def draw(self, seed: int) -> Load:
        rng = random.Random(seed)
        times, tokens = _arrivals(rng, self.rate, self.burstiness), _Tokens()
        requests = []
        for number in range(self.num_requests):
            prompt, output = self.lengths(rng)
            requests.append(LoadRequest(f"r{number}", ((tokens.unique(), prompt),), output, next(times)))
        return Load(self.name, requests)


def _arrivals(rng: random.Random, rate: float, burstiness: float) -> Iterator[float]:
    """Times of a gamma process from 0 on."""
    at = 0.0
    while True:
        yield at
        at += rng.gammavariate(1 / burstiness, burstiness / rate)


def by_session(requests: Iterable[LoadRequest]) -> dict[str, list[LoadRequest]]:
    """The requests of each session that come after its first, in order."""
    found: dict[str, list[LoadRequest]] = {}
    for one in requests:
        if one.session and one.arrival_s is None:
            found.setdefault(one.session, []).append(one)
    return found
