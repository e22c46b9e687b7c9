"""What the clients of one load saw: every gap between tokens, every wait for a first token; nothing is left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from random_loads import Client

from evenflow.bench.stall_run import Wait, is_pending


@dataclass(slots=True)
class Stream:
    """One request, and when its tokens came out."""

    id: str
    client: Client
    turn: int
    due: float  # when the client sends it
    is_long: bool
    num_prompt_tokens: int
    max_tokens: int
    num_cached_tokens: int = 0
    token_times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the clients of one run saw."""

    gaps: list[float]  # between the tokens of every stream, ascending
    gaps_beside: list[float]  # those that end while a long prompt waits for its first token
    long_ttft: list[float]  # of prompts sent outside chats, ascending; one cut off counts until the end
    chat_ttft: list[float]
    mean_error: float
    prefill_tokens_per_s: float  # of the long prompts, while one of them waits
    output_tokens_per_s: float

    def gap(self, quantile: float) -> float:
        return quantile_of(self.gaps, quantile)

    @property
    def mean_ttft(self) -> float:
        return fmean((*self.long_ttft, *self.chat_ttft))

    def ttft(self, quantile: float = 0.5) -> float:
        return quantile_of(self.long_ttft, quantile)


def outcome_of(streams: Iterable[Stream], errors: Sequence[float], now: float) -> Outcome:
    """`errors`: of the predictions of mixed steps, relative. A prompt without an answer has waited until `now`."""
    streams = list(streams)
    ttft: dict[bool, list[float]] = {True: [], False: []}
    waits: list[Wait] = []
    prefilled = 0
    for stream in streams:
        first = stream.token_times[0] if stream.token_times else now
        ttft[stream.is_long].append(first - stream.due)
        if stream.is_long:
            waits.append(Wait(stream.due, stream.due, first))
            prefilled += stream.num_prompt_tokens if stream.token_times else 0
    waits = _joined(waits)
    gaps = [pair for stream in streams for pair in pairwise(stream.token_times)]
    pending = sum(wait.first_token - wait.due for wait in waits)
    return Outcome(
        gaps=sorted(after - before for before, after in gaps),
        gaps_beside=sorted(after - before for before, after in gaps if is_pending(waits, after)),
        long_ttft=sorted(ttft[True]),
        chat_ttft=sorted(ttft[False]),
        mean_error=fmean(map(abs, errors)) if errors else math.nan,
        prefill_tokens_per_s=prefilled / pending if pending else math.nan,
        output_tokens_per_s=sum(len(stream.token_times) for stream in streams) / now if now else math.nan,
    )


def _joined(waits: Iterable[Wait]) -> list[Wait]:
    """Waits that overlap as one, so that few are left to look through."""
    found: list[Wait] = []
    for wait in sorted(waits):
        if found and wait.due <= found[-1].first_token:
            first_token = max(wait.first_token, found[-1].first_token)
            found[-1] = Wait(found[-1].due, found[-1].sent, first_token)
        else:
            found.append(wait)
    return found


def quantile_of(ordered: Sequence[float], quantile: float) -> float:
    """NaN if there are no samples."""
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else math.nan
