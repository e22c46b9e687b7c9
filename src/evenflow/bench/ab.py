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

from evenflow.bench.comparison import Comparison, in_turns
from evenflow.bench.endpoints import Answer, Ask, Endpoint, answer_of, check_endpoint
from evenflow.bench.figures import Difference, Estimate, estimate_ratios, percentile
from evenflow.errors import InvalidConfig

MIN_PAIRS = 2  # to resample
_ENOUGH_PAIRS, _ENOUGH_REQUESTS = 5, 60  # for a verdict; requests of all pairs


@dataclass(frozen=True, slots=True)
class Goals:
    """When a request counts as served well, on either side."""

    ttft_s: float
    tbt_s: float  # for 99 of 100 of its gaps
    tbt_reason: str = "--tbt-target"

    def __str__(self) -> str:
        return (
            f"Served well: the first token within {self.ttft_s:g} s (--ttft-target), and 99% of the gaps within "
            f"{1000 * self.tbt_s:g} ms ({self.tbt_reason}), the same for A and B."
        )

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
class Outcome:
    pairs: Sequence[Pair]
    num_pairs: int  # more than there are if the comparison was interrupted
    goals: Goals
    estimates: Sequence[Estimate]
    num_answers: int  # pairs of answers without an error
    differences: Sequence[Difference]
    errors: Sequence[str]

    @property
    def is_complete(self) -> bool:
        return len(self.pairs) == self.num_pairs

    @property
    def basis(self) -> str:
        """A sentence on how much the verdicts rest on."""
        num_pairs, num_requests = len(self.pairs), len(self.pairs[0].a.answers)
        text = f'"differ" rests on {num_pairs} pairs of {num_requests} requests'
        if num_pairs >= _ENOUGH_PAIRS and num_pairs * num_requests >= _ENOUGH_REQUESTS:
            return f"{text}."
        return (
            f"{text}, which is little: take {_ENOUGH_PAIRS} or more --pairs, and --requests for "
            f"{_ENOUGH_REQUESTS} or more in all, before you rely on it."
        )


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
    """Run all pairs and summarise them. `on_round` gets a line before each round.

    If the task is cancelled after MIN_PAIRS or more pairs, the result is their summary. Unless `keep_prompts`, the
    prompts of each pair begin with a line of their own, so that no answer comes from a cache that an earlier pair has
    filled.
    """
    endpoints = a, b
    async with a.open(), b.open():
        for endpoint in endpoints:
            on_round(f"warming up {endpoint.name}")
            await endpoint.begin_round()
            await check_endpoint(endpoint, replace(asks[0], max_tokens=2))
        comparison = Comparison[int, Round](in_turns((0, 1), num_pairs, random.Random(seed)))
        arrivals_s = asks[-1].at * len(comparison.turns)
        # Until a round was seen, only the arrivals are known.
        left = f"; at least {arrivals_s:.0f} s left" if arrivals_s >= 1 else ""
        try:
            for turn in comparison:
                on_round(f"pair {turn.round + 1} of {num_pairs}: {endpoints[turn.side].name}{left}")
                line = "" if keep_prompts else f"[{seed}-{turn.round}]\n"
                own = [replace(ask, prompt=f"{line}{ask.prompt}") for ask in asks]
                comparison.add(await _run_round(endpoints[turn.side], own))
                left = f"; {comparison.progress()}"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if len(comparison.results) < 2 * MIN_PAIRS or task is None:
                raise
            task.uncancel()
    # The last round's first side has no pair if the comparison was interrupted.
    pairs = list(map(Pair, comparison.of(0), comparison.of(1)))
    return summarise(pairs, goals, seed, num_pairs)


async def _run_round(endpoint: Endpoint, asks: Sequence[Ask]) -> Round:
    await endpoint.begin_round()
    start = time.perf_counter()

    async def send(ask: Ask) -> Answer:
        await asyncio.sleep(start + ask.at - time.perf_counter())
        return await answer_of(endpoint, ask)

    answers = await asyncio.gather(*map(send, asks))
    return Round(answers, time.perf_counter() - start)


def summarise(pairs: Sequence[Pair], goals: Goals, seed: int = 0, num_pairs: int | None = None) -> Outcome:
    """The figures, with confidence intervals from resampled pairs, and resampled requests within each.

    `num_pairs` says how many pairs were wanted; None: these.
    """
    both = [
        (number, request, a, b)
        for number, pair in enumerate(pairs)
        for request, (a, b) in enumerate(zip(pair.a.answers, pair.b.answers, strict=True))
        if a.error is None and b.error is None
    ]
    differences = [
        Difference.of(a.text, b.text, pair=number, request=request)
        for number, request, a, b in both
        if a.text != b.text
    ]
    errors = [answer.error for pair in pairs for side in pair for answer in side.answers if answer.error]
    sides = [(_side(pair.a, goals), _side(pair.b, goals)) for pair in pairs]
    estimates = estimate_ratios(sides, _figures, random.Random(seed))
    return Outcome(pairs, num_pairs or len(pairs), goals, estimates, len(both), differences, errors)


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
        "longest gap, s": percentile(gaps, 100),
        "output tokens/s": sum(answer.num_tokens for answer in answers) / seconds,
        "requests/s served well": sum(answer.is_good for answer in answers) / seconds,
    }
