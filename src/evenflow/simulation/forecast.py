"""Several runs of a load under one setup, and what they say together: figures with intervals, or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from evenflow.simulation.cluster import Cluster, Setup
from evenflow.simulation.load import Load
from evenflow.simulation.observing import Moment, Observed
from evenflow.simulation.samples import UNKNOWN, Histogram, Interval, Samples, intervals, percentile, spread_of

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
    refused: Mapping[str, int]
    prefix_share: float  # of prompt tokens
    num_preemptions: int
    kv_peak: float
    num_steps: int
    seconds: float  # of virtual time
    unknown: str | None  # why all figures are
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
    say: Callable[[str], object] = lambda text: None,
) -> Forecast:
    """Simulate `num_runs` runs, each with a load, a device and a moment of its recording by its own seed."""
    runs: list[Observed] = []
    num_requests = 0
    for number in range(num_runs):
        load = load_of(seed + number)
        num_requests += len(load.requests)
        say(f"Simulating {setup.policy}: run {number + 1} of {num_runs}, {len(load.requests):,} requests")
        runs.append(Cluster(load, setup, seed + number).run())
    return _judged(runs, str(setup.policy), num_requests)


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
        refused=_sum(run.refused for run in runs),
        prefix_share=sum(run.cached_tokens for run in runs) / max(1, sum(run.prompt_tokens for run in runs)),
        num_preemptions=sum(run.num_preemptions for run in runs),
        kv_peak=max(run.kv_peak for run in runs),
        num_steps=sum(run.num_steps for run in runs),
        seconds=sum(run.seconds for run in runs),
        unknown=unknown,
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
