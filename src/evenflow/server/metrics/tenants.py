"""Figures for a bounded number of tenants: clients can make up names, which must not displace real ones."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

MAX_TENANTS = 100  # per key, each with its own label
MAX_TENANT_CHARACTERS = 64
OTHER_TENANTS = "other"

_FAMILIES = {
    "evenflow:tenant_requests": "Finished requests.",
    "evenflow:tenant_prompt_tokens": "Their prompt tokens.",
    "evenflow:tenant_generation_tokens": "Their generated tokens.",
    "evenflow:tenant_queue_seconds": "Seconds that they waited for their first step.",
}


class TenantFigures(Collector):
    """Counts per key and tenant. Beyond a key's limit, the tenant with the fewest tokens joins `other`."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._by_key: dict[str, dict[str, list[float]]] = {}  # by key and tenant, in the order of the families

    def count(self, key: str, tenant: str, num_prompt_tokens: int, num_output_tokens: int, queue_s: float) -> None:
        figures = self._by_key.setdefault(key, {})
        label = _label(tenant)
        if label not in figures and len(figures) - (OTHER_TENANTS in figures) >= MAX_TENANTS:
            smallest = min((one for one in figures if one != OTHER_TENANTS), key=lambda one: sum(figures[one][1:3]))
            _add(figures.setdefault(OTHER_TENANTS, [0] * len(_FAMILIES)), figures.pop(smallest))
        _add(figures.setdefault(label, [0] * len(_FAMILIES)), [1, num_prompt_tokens, num_output_tokens, queue_s])

    def collect(self) -> Iterator[Metric]:
        return self.collect_for(None)

    def collect_for(self, key: str | None) -> Iterator[Metric]:
        """The figures of one key; None: of all keys."""
        shown = self._by_key if key is None else {key: self._by_key.get(key, {})}
        for place, (name, text) in enumerate(_FAMILIES.items()):
            family = CounterMetricFamily(name, text, labels=[*self._labels, "key", "tenant"])
            for key_name, figures in shown.items():
                for tenant, counts in figures.items():
                    family.add_metric([*self._labels.values(), key_name, tenant], counts[place])
            yield family


def _label(tenant: str) -> str:
    """The tenant's name on one line, escaped as in Python; never equal to `other`."""
    return rf"\{OTHER_TENANTS}" if tenant == OTHER_TENANTS else repr(tenant[:MAX_TENANT_CHARACTERS])[1:-1]


def _add(figures: list[float], more: list[float]) -> None:
    for place, number in enumerate(more):
        figures[place] += number
