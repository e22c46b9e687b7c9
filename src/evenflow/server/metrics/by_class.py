"""Figures by class of service, for metrics and the live page. Requests to host engines have no class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.instruments import ClassMetrics

_SHARES = (0.5, 0.99)


class _Class:
    """One class."""

    def __init__(self, name: str, metrics: ClassMetrics, window_s: int) -> None:
        self.ttft = metrics.ttft(name)
        self.tbt = metrics.tbt(name)
        self.recent_ttft = RecentQuantiles(window_s)
        self.recent_tbt = RecentQuantiles(window_s)
        self.num_open = 0
        self.num_waiting = 0  # of these, not in any step yet
        metrics.open_requests(name).set_function(lambda: self.num_open)
        metrics.waiting(name).set_function(lambda: self.num_waiting)


class ClassFigures:
    """Counts, waits and gaps of each class's requests."""

    def __init__(self, metrics: ClassMetrics, window_s: int) -> None:
        self._metrics = metrics
        self._window_s = window_s
        self._classes: dict[str, _Class] = {}  # in order of appearance

    def on_started(self, name: str) -> None:
        """A request of this class arrived."""
        if name and name not in self._classes:
            self._classes[name] = _Class(name, self._metrics, self._window_s)
        if name:
            self._classes[name].num_open += 1
            self._classes[name].num_waiting += 1

    def on_begun(self, name: str) -> None:
        """A request is in a step for the first time."""
        if name:
            self._classes[name].num_waiting -= 1

    def on_first_token(self, name: str, ttft: float, now: float) -> None:
        if name:
            self._classes[name].ttft.observe(ttft)
            self._classes[name].recent_ttft.observe(ttft, 1, now)

    @property
    def only(self) -> str | None:
        """The single class of all open requests, "" if they have none; None for several classes."""
        names = [name for name, one in self._classes.items() if one.num_open]
        return None if len(names) > 1 else next(iter(names), "")

    def on_gap(self, name: str, gap: float, count: int, now: float) -> None:
        """Record a gap before this many tokens."""
        if name:
            self._classes[name].tbt.observe(gap, count)
            self._classes[name].recent_tbt.observe(gap, count, now)

    def on_finished(self, name: str, *, has_begun: bool, num_prompt_tokens: int, num_output_tokens: int) -> None:
        if not name:
            return
        self._classes[name].num_open -= 1
        self._classes[name].num_waiting -= not has_begun
        self._metrics.requests(name).inc()
        self._metrics.prompt_tokens(name).inc(num_prompt_tokens)
        self._metrics.tokens(name).inc(num_output_tokens)

    def rows(self, now: float, tbt_window_s: float, ttft_window_s: float) -> Iterator[dict[str, Any]]:
        """One row for each class used so far."""
        for name, one in self._classes.items():
            tbt = one.recent_tbt.quantiles(_SHARES, now, tbt_window_s)
            ttft = one.recent_ttft.quantiles(_SHARES, now, ttft_window_s)
            counts = {"running": one.num_open - one.num_waiting, "waiting": one.num_waiting}
            yield {"name": name, **counts, "ttft": ttft, "tbt": tbt}


def busiest(open_requests: Sequence[tuple[str, bool]], limit: int) -> list[dict[str, Any]]:
    """Tenants with the most open requests. A request is given as (tenant, has begun)."""
    num_open = Counter(tenant for tenant, _ in open_requests)
    running = Counter(tenant for tenant, has_begun in open_requests if has_begun)
    return [
        {"name": tenant, "running": running[tenant], "waiting": count - running[tenant]}
        for tenant, count in num_open.most_common(limit)
    ]
