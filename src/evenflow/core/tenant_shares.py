"""Fair shares of one class by tenant: counters of virtual time, which grow with the service that a tenant gets.

A tenant's counter grows by its service in seconds over its weight, and the lowest counter goes first. So tenants that
always have prompts waiting get service in proportion to their weights, within one chunk each, however long their
prompts are. A tenant that returns starts level with the others: what it left unused was lent, not saved, except for
`LENT_S`, which lets a short burst of a light tenant go first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Seconds of service that a tenant of weight 1 gets back of what it lent, and that a class saves of its share.
LENT_S = 1.0
_RECENT_STEPS = 1024  # a tenant that was served in one of these may well come again
_MAX_KNOWN = 1024  # tenants without prompts waiting whose counters are kept


@dataclass(slots=True)
class TenantShares:
    """The counters of one class."""

    weights: Mapping[str, float]  # of tenants; 1 if not listed
    _counters: dict[str, float] = field(default_factory=dict)
    _served_at: dict[str, int] = field(default_factory=dict)  # number of the step that last served it
    _floor: float = 0.0  # no tenant with prompts waiting has been below it

    def weight(self, tenant: str) -> float:
        return self.weights.get(tenant, 1.0)

    def standing(self, tenant: str) -> tuple[float, int]:
        """The lowest goes first; of equals, the one that was not served for longest."""
        return self._counters.get(tenant, self._floor), self._served_at.get(tenant, -1)

    def is_contended(self, step: int) -> bool:
        """Have several been served recently?"""
        return len(self._served_at) > 1 and sum(step - at < _RECENT_STEPS for at in self._served_at.values()) > 1

    def enter(self, tenant: str, others: Collection[str]) -> None:
        """A tenant has a prompt again. If those of others wait, it gets back some of what they borrowed.

        A tenant without a counter starts at 0, where all did: it lent no more than others have had since then.
        """
        lowest = min((self.standing(other)[0] for other in others), default=None)
        start = self._floor if lowest is None else max(self._floor, lowest) - LENT_S
        self._counters[tenant] = max(self._counters.get(tenant, 0.0), start)
        self._forget({tenant, *others})

    def charge(self, seconds_of: Mapping[str, float], waiting: Collection[str], step: int) -> None:
        """Charge a step's service to these tenants. `waiting`: tenants that had prompts waiting."""
        for tenant, seconds in seconds_of.items():
            self._counters[tenant] = self.standing(tenant)[0] + seconds / self.weight(tenant)
            self._served_at[tenant] = step
        self._floor = max(self._floor, min((self.standing(tenant)[0] for tenant in waiting), default=self._floor))
        self._forget(waiting)

    def _forget(self, waiting: Collection[str]) -> None:
        """Bound the counters: drop the lower half. A tenant with a low one starts no lower when it returns."""
        if len(self._counters) <= _MAX_KNOWN + len(waiting):
            return
        needed = set(waiting)
        idle = [tenant for tenant in self._counters if tenant not in needed]
        for tenant in sorted(idle, key=self._counters.__getitem__)[: len(idle) // 2]:
            del self._counters[tenant]
            self._served_at.pop(tenant, None)

    def clear(self) -> None:
        """No request of the class is left: all counters start again."""
        self._counters.clear()
        self._served_at.clear()
        self._floor = 0.0
