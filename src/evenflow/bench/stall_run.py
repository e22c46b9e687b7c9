"""One run of the stall load: token times, which gaps between them count, and the figures of several runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Self

from evenflow.bench.figures import percentile
from evenflow.bench.stall_load import StallLoad
from evenflow.core.report import Stall

NUM_WORST_GAPS = 5  # of a run


class Wait(NamedTuple):
    """A long prompt's wait for its first token."""

    due: float
    sent: float
    first_token: float

    def covers(self, at: float) -> bool:
        return self.sent < at <= self.first_token


def is_pending(waits: Iterable[Wait], at: float) -> bool:
    return any(wait.covers(at) for wait in waits)


class TokenSeen(NamedTuple):
    """A token, or several that came at once, with another one before it in its stream."""

    request_id: str
    at: float
    gap: float
    counts: bool  # a long prompt was waiting for its first token


class PrefillSpan(NamedTuple):
    """A step with prefill of a long prompt."""

    start: float
    end: float
    num_tokens: int


@dataclass(slots=True)
class StallRun:
    """What clients saw, and what the engine reported. Times are seconds since the run began."""

    began: float = 0.0  # by the clock
    tokens: list[TokenSeen] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    long_prompt_tokens: int = 0
    long_answers: list[Any] = field(default_factory=list)  # token ids or text, in the order of the prompts
    output_tokens: int = 0
    total_s: float = 0.0
    # From the engine's reports; empty if only clients were watched.
    prefills: list[PrefillSpan] = field(default_factory=list)
    step_errors: list[float] = field(default_factory=list)  # prediction errors of mixed steps
    num_late: int = 0  # of the tokens that count, after their deadline
    worst: list[Stall] = field(default_factory=list)  # the longest gaps that count, longest first, one per step

    @property
    def counted(self) -> list[TokenSeen]:
        return [token for token in self.tokens if token.counts]

    @property
    def long_ttft_s(self) -> list[float]:
        return [wait.first_token - wait.due for wait in self.waits]

    @property
    def pending_s(self) -> float:
        """Seconds during which a long prompt waited for its first token."""
        total, end = 0.0, -math.inf
        for wait in sorted(self.waits, key=lambda wait: wait.sent):
            total += max(0.0, wait.first_token - max(wait.sent, end))
            end = max(end, wait.first_token)
        return total


def observe(load: StallLoad, began: float, times: Mapping[str, Sequence[float]], sent: Mapping[str, float]) -> StallRun:
    """A run from the clock's times: of each request's tokens, and of when each long prompt was sent."""
    asks = load.long_asks()
    waits = [Wait(ask.at, sent[name] - began, times[name][0] - began) for name, ask in asks.items()]
    tokens = [
        TokenSeen(name, now - began, now - before, is_pending(waits, now - began))
        for name, moments in times.items()
        for before, now in pairwise(moments)
        if now > began
    ]
    return StallRun(
        began=began,
        tokens=sorted(tokens, key=lambda token: token.at),
        waits=waits,
        long_prompt_tokens=sum(map(len, load.long_prompts)),
        output_tokens=sum(now > began for moments in times.values() for now in moments),
        total_s=max(times[name][-1] for name in asks) - began,
    )


def join(runs: Iterable[StallRun]) -> StallRun:
    """Runs of the parts of one load, as if each had begun when the previous one ended."""
    joined = StallRun()
    for run in runs:
        began = joined.total_s
        joined.tokens += [token._replace(at=began + token.at) for token in run.tokens]
        joined.waits += [Wait(*(began + moment for moment in wait)) for wait in run.waits]
        joined.long_prompt_tokens += run.long_prompt_tokens
        joined.long_answers += run.long_answers
        joined.output_tokens += run.output_tokens
        joined.total_s += run.total_s
        joined.prefills += [span._replace(start=began + span.start, end=began + span.end) for span in run.prefills]
        joined.step_errors += run.step_errors
        joined.num_late += run.num_late
        joined.worst = longest_gaps([*joined.worst, *run.worst])
    return joined


def longest_gaps(gaps: Iterable[Stall]) -> list[Stall]:
    return sorted(gaps, key=lambda gap: -gap.gap_s)[:NUM_WORST_GAPS]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFigures:
    """All runs under one policy, as clients see them. Gaps count while a long prompt waits for its first token."""

    policy: str
    target_s: float | None
    num_gaps: int
    tbt_p50_s: float
    tbt_p90_s: float
    tbt_p99_s: float
    tbt_max_s: float
    long_ttft_p50_s: float
    long_ttft_max_s: float
    prefill_tokens_per_s: float  # while a long prompt waits
    total_s: float  # the median run's
    output_tokens_per_s: float

    @classmethod
    def of(cls, policy: str, target_s: float | None, runs: Sequence[StallRun], **more: Any) -> Self:
        gaps = sorted(token.gap for run in runs for token in run.counted)
        ttfts = [ttft for run in runs for ttft in run.long_ttft_s]
        return cls(
            policy=policy,
            target_s=target_s,
            num_gaps=len(gaps),
            tbt_p50_s=percentile(gaps, 50),
            tbt_p90_s=percentile(gaps, 90),
            tbt_p99_s=percentile(gaps, 99),
            tbt_max_s=gaps[-1],
            long_ttft_p50_s=median(ttfts),
            long_ttft_max_s=max(ttfts),
            prefill_tokens_per_s=sum(run.long_prompt_tokens for run in runs) / sum(run.pending_s for run in runs),
            total_s=median(run.total_s for run in runs),
            output_tokens_per_s=sum(run.output_tokens for run in runs) / sum(run.total_s for run in runs),
            **more,
        )
