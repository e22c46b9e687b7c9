"""Sides that take turns under the same load: whose turn it is, how long the rest takes, and what each turn gave."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from evenflow.config import EngineConfig
from evenflow.core.policies import PolicySpec
from evenflow.engine.engine import Engine

S = TypeVar("S")
R = TypeVar("R")

_MIN_SHARE = 0.1  # of the first turn; what it took so far says little before


class Turn(NamedTuple, Generic[S]):
    """One run of one side."""

    side: S
    round: int  # from 0
    load: Any = None  # a part of the whole load; None: all of it


def in_turns(sides: Sequence[S], num_rounds: int, order: random.Random | None = None) -> list[Turn[S]]:
    """Each side once a round, so that a machine that slows down affects all; as given, or in random order."""
    return [
        Turn(side, number)
        for number in range(num_rounds)
        for side in (sides if order is None else order.sample(sides, len(sides)))
    ]


def resolved_for(engine: Engine, policy: PolicySpec) -> PolicySpec:
    """The policy as this engine runs it, checked against the engine's context."""
    return EngineConfig(policy=policy).resolve_policy(engine.limits.max_model_len)


class Comparison(Generic[S, R]):
    """The turns, and the results of those that are done: not of all, if it was interrupted.

    Iterate over the turns, and `add` the result of each.
    """

    def __init__(
        self,
        turns: Sequence[Turn[S]],
        forecast: Sequence[float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`forecast` has the seconds of each turn; None: all take as long, and how long is not known."""
        self.turns = turns
        self.results: list[R] = []
        self._forecast = [1.0] * len(turns) if forecast is None else forecast
        self._clock = clock
        self._began = clock()

    def __iter__(self) -> Iterator[Turn[S]]:
        for number, turn in enumerate(self.turns):
            assert number == len(self.results), "a turn has no result"
            yield turn

    def add(self, result: R) -> None:
        self.results.append(result)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(self.turns)

    def of(self, side: S) -> list[R]:
        return [result for turn, result in zip(self.turns, self.results, strict=False) if turn.side == side]

    def progress(self, share: float = 0.0) -> str:
        """For a user, with this share of the current turn done; the time left as forecast, corrected by that so far."""
        num_done, total = len(self.results), sum(self._forecast)
        done = sum(self._forecast[:num_done]) + share * sum(self._forecast[num_done : num_done + 1])
        left = total - done
        if done and (num_done or share >= _MIN_SHARE):
            left *= (self._clock() - self._began) / done
        return f"{done / total if total else 0:.0%} done, about {left:.0f} s left"
