"""Several runs of a load under one setup, and what they say together: figures with intervals, or nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from evenflow.simulation.cluster import Setup
from evenflow.simulation.fleet import simulate_fleet
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Moment, Observed
from evenflow.simulation.samples import (
    UNKNOWN,
    Histogram,
    Interval,
    Samples,
    intervals,
    percentile,
    sampling_error,
    spread_of,
)

PERCENTS = (50.0, 90.0, 99.0, 99.9)
_CURVE = (1, 5, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9)
# With more of its tokens from shapes that were never recorded, a forecast would be a guess.
_MAX_BEYOND_SHARE = 0.001
_KINDS: Mapping[str, Callable[[Observed], Samples]] = {
    "ttft": lambda run: run.ttft,
    "gap": lambda run: run.gaps,
    "latency": lambda run: run.latency,
}


def percent_name(percent: float) -> str:
    return f"p{percent:g}"


@dataclass(frozen=True, slots=True)
class Sample:
    """Replicas that were simulated in place of all, and what that adds to the uncertainty."""

    num_simulated: int  # in each run
    num_replicas: int
    errors: Mapping[str, Mapping[str, float]]  # by kind and percentile, as shares of the figure: nine of ten are within

    def as_json(self) -> dict[str, Any]:
        return {"num_simulated": self.num_simulated, "num_replicas": self.num_replicas, "errors": self.errors}


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one setup does with a load. Seconds, unless the name says otherwise."""

    policy: str
    num_runs: int
    num_requests: int  # of all runs, as the next ones
    num_done: int
    percentiles: Mapping[str, Mapping[str, Interval]]  # by kind
    requests_per_s: Interval
    tokens_per_s: Interval
    goodput: Interval  # requests a second that meet the targets
    good_share: Interval
    late_share: float  # of all gaps
    causes: Mapping[str, int]
    missed: Mapping[str, int]  # requests over a target: by first tokens, and by gaps
    refused: Mapping[str, int]
    prefix_share: float  # of prompt tokens
    num_preemptions: int
    kv_peak: float
    num_steps: int
    seconds: float  # of virtual time
    unknown: str | None  # why all figures are
    sample: Sample | None  # of the replicas; None: all were simulated
    curve: Mapping[str, Sequence[tuple[float, float | None]]]  # percents and seconds
    moments: Sequence[Moment]  # of the first run

    def as_json(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__ if name not in ("curve", "moments")}
        return found | {"percentiles": {kind: dict(one) for kind, one in self.percentiles.items()}}


def forecast(
    load_of: Callable[[int], Load],
    setup: Setup,
    *,
    num_runs: int,
    seed: int = 0,
    sample: int | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Forecast:
    """Simulate `num_runs` runs, each with a load, a device and a moment of its recording by its own seed.

    With a sample, only of about this many of the replicas.
    """
    groups: list[list[Observed]] = []
    num_requests = 0
    for number in range(num_runs):
        load = load_of(seed + number)
        num_requests += len(load.requests)
        say(f"Simulating {setup.policy}: run {number + 1} of {num_runs}, {len(load.requests):,} requests")
        groups.append(simulate_fleet(load, setup, seed + number, sample))
    runs = [Observed.together(parts) for parts in groups]
    found = _judged(runs, str(setup.policy), num_requests)
    if sample is None or found.unknown is not None:
        return found
    return _of_sample(found, groups, setup)


def _of_sample(found: Forecast, groups: Sequence[Sequence[Observed]], setup: Setup) -> Forecast:
    """With rates of all replicas, and the error that the choice of replicas makes."""
    num_simulated = sum(one.num_replicas for one in groups[0])
    scale = setup.num_replicas / num_simulated
    left_out = math.sqrt(1 - num_simulated / setup.num_replicas)
    errors = {
        kind: {
            percent_name(percent): left_out * sampling_error([[of(one) for one in run] for run in groups], percent)
            for percent in PERCENTS
        }
        for kind, of in _KINDS.items()
    }
    return replace(
        found,
        sample=Sample(num_simulated, setup.num_replicas, errors),
        requests_per_s=_scaled(found.requests_per_s, scale),
        tokens_per_s=_scaled(found.tokens_per_s, scale),
        goodput=_scaled(found.goodput, scale),
    )


def _scaled(one: Interval, scale: float) -> Interval:
    return Interval(*(None if value is None else scale * value for value in (one.value, one.low, one.high)))


def _judged(runs: Sequence[Observed], policy: str, num_requests: int) -> Forecast:
    unknown = _unknown(runs)
    figures = {percent_name(percent): partial(_percentile, percent=percent) for percent in PERCENTS}
    percentiles = {
        kind: dict.fromkeys(figures, UNKNOWN) if unknown else intervals([of(run) for run in runs], figures)
        for kind, of in _KINDS.items()
    }

    def spread(of: Callable[[Observed], float]) -> Interval:
        return UNKNOWN if unknown else spread_of([of(run) for run in runs])

    gaps = sum(run.gaps.count for run in runs)
    return Forecast(
        policy=policy,
        num_runs=len(runs),
        num_requests=num_requests,
        num_done=sum(run.num_done for run in runs),
        percentiles=percentiles,
        requests_per_s=spread(lambda run: run.num_done / run.seconds if run.seconds else 0.0),
        tokens_per_s=spread(lambda run: run.num_tokens / run.seconds if run.seconds else 0.0),
        goodput=spread(lambda run: run.num_good / run.seconds if run.seconds else 0.0),
        good_share=spread(lambda run: run.num_good / max(1, run.num_done + run.refused.total())),
        late_share=sum(run.num_late for run in runs) / max(1, gaps),
        causes=_sum(run.causes for run in runs),
        missed=_sum(run.missed for run in runs),
        refused=_sum(run.refused for run in runs),
        prefix_share=sum(run.cached_tokens for run in runs) / max(1, sum(run.prompt_tokens for run in runs)),
        num_preemptions=sum(run.num_preemptions for run in runs),
        kv_peak=max(run.kv_peak for run in runs),
        num_steps=sum(run.num_steps for run in runs),
        seconds=sum(run.seconds for run in runs),
        unknown=unknown,
        sample=None,
        curve={} if unknown else {kind: _curve([of(run) for run in runs]) for kind, of in _KINDS.items()},
        moments=runs[0].moments,
    )


def _percentile(histogram: Histogram, percent: float) -> float | None:
    return percentile(histogram, percent)


def _curve(samples: Sequence[Samples]) -> list[tuple[float, float | None]]:
    total: Histogram = Counter()
    for one in samples:
        total.update(one.total())
    return [(percent, percentile(total, percent)) for percent in _CURVE]


def _sum(counters: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counters:
        total.update({str(key): count for key, count in one.items()})
    return dict(total.most_common())


def _unknown(runs: Sequence[Observed]) -> str | None:
    beyond: Counter[str] = Counter()
    for run in runs:
        beyond.update(run.beyond)
    num_tokens = sum(run.num_tokens for run in runs)
    if not num_tokens:
        return "no request could be served"
    if beyond.total() <= _MAX_BEYOND_SHARE * num_tokens:
        return None
    what = beyond.most_common(1)[0][0]
    return f"{beyond.total() / num_tokens:.1%} of the tokens come from steps beyond the recorded ones: {what}"
