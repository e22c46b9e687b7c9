"""The configuration for a load and its targets: candidates in virtual time, halved round by round.

All candidates begin on one replica. The better half goes on with twice the replicas until one of them meets the goal,
then the best third with three times the requests. The last one gets as few replicas as it needs. All candidates see the
same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenflow.core.policies import PolicySpec
from evenflow.counts import counted
from evenflow.simulation.cluster import Setup
from evenflow.simulation.forecast import Forecast, forecast
from evenflow.simulation.load import Load

# Requests for each replica in the rounds.
_ROUNDS = (100, 300, 900)
_KEPT = 3  # one in this many
_LEAST_GAIN = 0.002  # of the share, by twice the replicas: with less, the goal is out of reach
_MAX_SIMULATED = 8  # replicas: of more, a sample
_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # of the load, until something breaks
TWICE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration of a replica, as its engine is given it."""

    policy: PolicySpec
    max_num_seqs: int
    command: str

    def __str__(self) -> str:
        return f"{self.policy}, {self.max_num_seqs} at a time"

    def as_json(self) -> dict[str, Any]:
        return {"policy": str(self.policy), "max_num_seqs": self.max_num_seqs, "command": self.command}

    def on(self, setup: Setup, num_replicas: int) -> Setup:
        return replace(setup, policy=self.policy, max_num_seqs=self.max_num_seqs, num_replicas=num_replicas)


@dataclass(frozen=True, slots=True)
class Rung:
    """What a configuration does at a multiple of the load."""

    factor: float
    forecast: Forecast
    breaks: str | None  # what most late requests missed; None: the goal is met

    def as_json(self) -> dict[str, Any]:
        return {"factor": self.factor, "forecast": self.forecast, "breaks": self.breaks}


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best configuration of one engine."""

    candidate: Candidate
    num_replicas: int
    is_met: bool  # the goal
    forecast: Forecast
    limit: str  # what is nearest to its bound
    tried: Sequence[tuple[str, float]]  # each candidate of the first round, with its share of requests in time
    ladder: Sequence[Rung]  # more load on the same replicas, up to the first that breaks
    replicas_for_twice: int | None  # None: more than may be used

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


Say = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuner:
    """Finds the configuration of one engine."""

    load_of: Callable[[int], Load]
    setup: Setup
    share: float  # of the requests that must be within the targets
    max_replicas: int
    num_runs: int
    seed: int
    say: Say

    def choose(self, candidates: Sequence[Candidate]) -> Choice:
        best, tried = self._best(candidates)
        replicas, is_enough = self._replicas(best, 1.0, _ROUNDS[-1])
        setup = best.on(self.setup, replicas)
        text = f"{best.policy} on {counted(replicas, 'replica')}"
        final = self._forecast(setup, self.load_of, self.num_runs, partial(self.say, text))
        for_twice, is_enough_for_twice = self._replicas(best, TWICE, _ROUNDS[-1], least=replicas)
        return Choice(
            candidate=best,
            num_replicas=replicas,
            is_met=is_enough and self._share(final) >= self.share,
            forecast=final,
            limit=nearest_bound(final, self.setup),
            tried=tried,
            ladder=self._ladder(best, replicas),
            replicas_for_twice=for_twice if is_enough_for_twice else None,
        )

    def _best(self, candidates: Sequence[Candidate]) -> tuple[Candidate, list[tuple[str, float]]]:
        """And all of them on one replica, with their shares."""
        left, replicas, before = list(candidates), 1, -1.0
        tried: list[tuple[str, float]] = []
        while True:
            scores = self._scores(left, replicas, _ROUNDS[0])
            tried = tried or [(str(one), share) for one, (share, _) in scores]
            left, share = [one for one, _ in scores], scores[0][1][0]
            if share >= self.share or share < before + _LEAST_GAIN or 2 * replicas > self.max_replicas:
                break
            left, replicas, before = left[: max(_KEPT, len(left) // 2)], 2 * replicas, share
        for size in _ROUNDS[1:]:
            left = left[: max(1, len(left) // _KEPT)]
            if len(left) > 1:
                left = [one for one, _ in self._scores(left, replicas, size)]
        return left[0], tried

    def _scores(
        self, candidates: Sequence[Candidate], replicas: int, size: int
    ) -> list[tuple[Candidate, tuple[float, float]]]:
        """The best first."""
        found = []
        for number, one in enumerate(candidates):
            self.say(f"{one} on {counted(replicas, 'replica')}", number, len(candidates))
            found.append((one, _score(self._run(one, replicas, 1.0, size))))
        return sorted(found, key=lambda scored: scored[1], reverse=True)

    def _replicas(self, candidate: Candidate, factor: float, size: int, least: int = 1) -> tuple[int, bool]:
        """The fewest that meet the goal. If none do: as many as help, and False."""

        def share_on(count: int) -> float:
            self.say(f"{candidate.policy} on {counted(count, 'replica')}", 0, 1)
            return self._share(self._run(candidate, count, factor, size))

        low, high = least - 1, least  # too few, and perhaps enough
        before, share = -1.0, share_on(high)
        while share < self.share:
            if high == self.max_replicas or share < before + _LEAST_GAIN:
                return max(least, low if share < before + _LEAST_GAIN else high), False
            low, high, before = high, min(2 * high, self.max_replicas), share
            share = share_on(high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if share_on(middle) >= self.share else (middle, high)
        return high, True

    def _ladder(self, candidate: Candidate, replicas: int) -> list[Rung]:
        rungs: list[Rung] = []
        for number, factor in enumerate(_FACTORS):
            self.say(f"{candidate.policy} at {factor:g} times the load", number, len(_FACTORS))
            found = self._run(candidate, replicas, factor, _ROUNDS[-1])
            breaks = None if self._share(found) >= self.share else _breaks(found, self.setup)
            rungs.append(Rung(factor, found, breaks))
            if breaks is not None and factor >= TWICE:
                break
        return rungs

    def _run(self, candidate: Candidate, replicas: int, factor: float, size: int) -> Forecast:
        setup = candidate.on(self.setup, replicas)
        return self._forecast(setup, lambda seed: self.load_of(seed).first(size * replicas).faster(factor), 1)

    def _forecast(
        self, setup: Setup, load_of: Callable[[int], Load], num_runs: int, say: Callable[[int, int], None] | None = None
    ) -> Forecast:
        numbers = iter(range(num_runs))
        return forecast(
            load_of,
            setup,
            num_runs=num_runs,
            seed=self.seed,
            sample=sample_of(setup),
            say=lambda _: say(next(numbers), num_runs) if say is not None else None,
        )

    @staticmethod
    def _share(found: Forecast) -> float:
        """Of requests within the targets; 0 if it is unknown."""
        return found.good_share.value or 0.0


def sample_of(setup: Setup) -> int | None:
    """How many of the replicas are simulated."""
    most = _MAX_SIMULATED if setup.router in ("round-robin", "tenant") else 4 * _MAX_SIMULATED
    return most if setup.num_replicas > most else None


def _score(found: Forecast) -> tuple[float, float]:
    """More requests in time, then shorter waits."""
    if found.unknown is not None:
        return -1.0, 0.0
    return round(found.good_share.value or 0.0, 3), -(found.percentiles["ttft"]["p50"].value or 0.0)


def _breaks(found: Forecast, setup: Setup) -> str:
    """What most of the requests that are late missed."""
    if found.unknown is not None or found.refused or found.num_preemptions:
        return nearest_bound(found, setup)
    what, count = max(found.missed.items(), key=lambda one: one[1])
    return f"{what}: late for {count / found.num_done:.1%} of the requests"


def nearest_bound(found: Forecast, setup: Setup) -> str:
    """The figure that comes nearest to its bound, or exceeds it most."""
    if found.unknown is not None:
        return f"unknown: {found.unknown}"
    if found.refused:
        return f"refused requests: {next(iter(found.refused))}"
    bounds = [(found.kv_peak, f"the KV cache: {found.kv_peak:.0%} full, {found.num_preemptions} preemptions")]
    for kind, name, target in (("gap", "gaps", setup.targets.tbt), ("ttft", "first tokens", setup.targets.ttft)):
        value = found.percentiles[kind]["p99"].value
        if target is not None and value is not None:
            bounds.append((value / target, f"{name}: p99 is {value / target:.0%} of the target"))
    if found.num_preemptions:
        return bounds[0][1]
    return max(bounds)[1]
