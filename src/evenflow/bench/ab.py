"""Two endpoints under the same requests, in pairs of rounds: what differs, and how certain that is.

Both sides of a pair answer the same requests, one side after the other, in random order, so that a machine that slows
down affects both alike.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from evenflow.bench.endpoints import Answer, Ask, Endpoint
from evenflow.bench.estimates import Estimate, divergence, estimate_ratios
from evenflow.bench.figures import percentile
from evenflow.errors import EndpointFailed, InvalidConfig


@dataclass(frozen=True, slots=True)
class Goals:
    """When a request counts as served well."""

    ttft_s: float
    tbt_s: float  # for 99 of 100 of its gaps

    def are_met(self, answer: Answer) -> bool:
        if answer.error is not None or answer.ttft_s is None:
            return False
        return answer.ttft_s <= self.ttft_s and percentile(sorted(answer.gaps_s), 99) <= self.tbt_s


@dataclass(frozen=True, slots=True)
class Round:
    """One side's answers to all requests, in their order."""

    answers: Sequence[Answer]
    seconds: float


class Pair(NamedTuple):
    a: Round
    b: Round


@dataclass(frozen=True, slots=True)
class Difference:
    """A request whose greedy answers differ: from which character on, and how each continues."""

    pair: int
    request: int
    character: int
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Outcome:
    pairs: Sequence[Pair]
    estimates: Sequence[Estimate]
    num_answers: int  # pairs of answers without an error
    differences: Sequence[Difference]
    errors: Sequence[str]


def make_asks(prompts: Sequence[str], max_tokens: int, rate: float, seed: int) -> list[Ask]:
    """Requests at random times, `rate` per second on average; 0: all at once."""
    if not prompts:
        raise InvalidConfig("Got no prompts but expected at least one.")
    generator, at, asks = random.Random(seed), 0.0, []
    for prompt in prompts:
        asks.append(Ask(prompt, max_tokens, at))
        at += generator.expovariate(rate) if rate else 0.0
    return asks


async def compare(
    a: Endpoint,
    b: Endpoint,
    asks: Sequence[Ask],
    *,
    num_pairs: int,
    goals: Goals,
    seed: int = 0,
    keep_prompts: bool = False,
    on_round: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run all pairs and summarise them.

    Unless `keep_prompts`, the prompts of each pair begin with a line of their own, so that no answer comes from a cache
    that an earlier pair has filled.
    """
    order, pairs = random.Random(seed), []
    async with a.open(), b.open():
        for endpoint in (a, b):
            on_round(f"warming up {endpoint.name}")
            [answer] = (await _run_round(endpoint, [replace(asks[0], max_tokens=2, at=0.0)])).answers
            if answer.error is not None:
                raise EndpointFailed(f"{endpoint.name}: {answer.error}")
        for number in range(num_pairs):
            own = asks if keep_prompts else [replace(ask, prompt=f"[{seed}-{number}]\n{ask.prompt}") for ask in asks]
            rounds = {}
            for endpoint in order.sample((a, b), 2):
                on_round(f"pair {number + 1} of {num_pairs}: {endpoint.name}")
                rounds[endpoint is a] = await _run_round(endpoint, own)
            pairs.append(Pair(rounds[True], rounds[False]))
    return summarise(pairs, goals, seed)


async def _run_round(endpoint: Endpoint, asks: Sequence[Ask]) -> Round:
    await endpoint.begin_round()
    start = time.perf_counter()

    async def send(ask: Ask) -> Answer:
        await asyncio.sleep(start + ask.at - time.perf_counter())
        await endpoint.stream(ask, answer := Answer())
        return answer

    answers = await asyncio.gather(*map(send, asks))
    return Round(answers, time.perf_counter() - start)


def summarise(pairs: Sequence[Pair], goals: Goals, seed: int = 0) -> Outcome:
    """The figures, with confidence intervals from resampled pairs, and resampled requests within each."""
    both = [
        (number, request, a, b)
        for number, pair in enumerate(pairs)
        for request, (a, b) in enumerate(zip(pair.a.answers, pair.b.answers, strict=True))
        if a.error is None and b.error is None
    ]
    differences = [
        Difference(number, request, *divergence(a.text, b.text)) for number, request, a, b in both if a.text != b.text
    ]
    errors = [answer.error for pair in pairs for side in pair for answer in side.answers if answer.error]
    sides = [(_side(pair.a, goals), _side(pair.b, goals)) for pair in pairs]
    return Outcome(pairs, estimate_ratios(sides, _figures, random.Random(seed)), len(both), differences, errors)


class _Served(NamedTuple):
    """What counts of one answer, worked out once because it is resampled a thousand times."""

    ttfts: list[float]  # one; none after an error
    gaps: list[float]
    num_tokens: int
    is_good: bool


_Side = tuple[Sequence[_Served], float]  # a round's answers, and its seconds


def _side(one: Round, goals: Goals) -> _Side:
    def served(answer: Answer) -> _Served:
        has_failed = answer.error is not None
        ttfts, gaps = ([], []) if has_failed else (answer.piece_times_s[:1], answer.gaps_s)
        return _Served(ttfts, gaps, answer.num_tokens, goals.are_met(answer))

    return [served(answer) for answer in one.answers], one.seconds


def _figures(rounds: Sequence[_Side]) -> dict[str, float]:
    """One side's; 0 if there is nothing to measure."""
    answers = [answer for served, _ in rounds for answer in served]
    ttfts = sorted(chain.from_iterable(answer.ttfts for answer in answers))
    gaps = sorted(chain.from_iterable(answer.gaps for answer in answers))
    seconds = sum(seconds for _, seconds in rounds)
    return {
        "TTFT p50, s": percentile(ttfts, 50),
        "TTFT p99, s": percentile(ttfts, 99),
        "TTFT mean, s": fmean(ttfts or [0.0]),
        "TBT p50, s": percentile(gaps, 50),
        "TBT p99, s": percentile(gaps, 99),
        "output tokens/s": sum(answer.num_tokens for answer in answers) / seconds,
        "requests/s served well": sum(answer.is_good for answer in answers) / seconds,
    }
