"""Distributions that take many equal values at once: a histogram for Prometheus, and recent quantiles.

Every token is counted here, so one call takes all tokens of a step with equal gaps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_RATIO = 1.02  # of adjacent bucket bounds, which limits the error of a quantile
_LOG_RATIO = math.log(_RATIO)


class BulkHistogram(Collector):
    """One histogram under one or more names."""

    def __init__(self, names: dict[str, str], buckets: Sequence[float], labels: dict[str, str]) -> None:
        self._names = names  # documentation by name
        self._bounds = [*buckets, math.inf]
        self._labels = labels
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[Metric]:
        for name, documentation in self._names.items():
            family = HistogramMetricFamily(name, documentation, labels=list(self._labels))
            self.add_to(family)
            yield family

    def add_to(self, family: HistogramMetricFamily) -> None:
        """Add the samples with these labels to a metric family."""
        bounds = [*(str(float(bound)) for bound in self._bounds[:-1]), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)


class SplitBulkHistogram(Collector):
    """One histogram for each value of a label."""

    def __init__(self, name: str, text: str, label: str, buckets: Sequence[float], labels: dict[str, str]) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._buckets = buckets
        self._labels = labels
        self._histograms: dict[str, BulkHistogram] = {}

    def __call__(self, value: str) -> BulkHistogram:
        """The histogram for this value."""
        if value not in self._histograms:
            self._histograms[value] = BulkHistogram({}, self._buckets, self._labels | {self._label: value})
        return self._histograms[value]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[*self._labels, self._label])
        for histogram in self._histograms.values():
            histogram.add_to(family)
        yield family


class RecentQuantiles:
    """Quantiles of recent positive values, within 2%, in constant memory."""

    def __init__(self, max_seconds: int) -> None:
        # Per second, the number of values in each bucket of a geometric scale.
        self._slots: deque[tuple[int, Counter[int]]] = deque(maxlen=max_seconds + 1)

    def observe(self, value: float, count: int, now: float) -> None:
        second = int(now)
        if not self._slots or self._slots[-1][0] < second:
            self._slots.append((second, Counter()))
        self._slots[-1][1][math.ceil(math.log(max(value, 1e-6)) / _LOG_RATIO)] += count

    def quantiles(self, shares: Sequence[float], now: float, seconds: float) -> list[float | None]:
        """Quantiles for these shares; None without values."""
        counts: Counter[int] = Counter()
        for second, slot in self._slots:
            if second > now - seconds - 1:
                counts.update(slot)
        scale = sorted(counts)
        sums = list(accumulate(counts[bucket] for bucket in scale))
        if not sums:
            return [None] * len(shares)
        return [_RATIO ** (scale[bisect_left(sums, share * sums[-1])] - 0.5) for share in shares]
