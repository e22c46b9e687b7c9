"""Which cached prefix is evicted first: within a tenant, by age and by what it costs to compute again.

Each tenant has a queue. A key's rank is the queue's floor when it was last used, plus its cost; the lowest rank goes
first and becomes the floor. With equal costs this is least recently used; a prefix that costs twice as much stays twice
as long. Room is taken from the tenant that has the most for its weight, so a flood of prompts evicts that tenant's own
prefixes: those of others are safe up to their shares. A tenant that stays away loses this protection.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, KeysView, Mapping
from typing import Generic, TypeVar

# A tenant's cached prefixes are safe for this long after its last request arrived.
KEEP_S = 600.0

Key = TypeVar("Key", bound=Hashable)


class _Queue(Generic[Key]):
    """One tenant's keys. A key that was removed stays in the heap until it comes up, or until most are such."""

    def __init__(self, seen: float) -> None:
        self.seen = seen  # when its last request arrived, or a later time
        self.numbers: dict[Key, int] = {}  # of the entries that count
        self._heap: list[tuple[float, int, Key]] = []  # rank, number
        self._floor = 0.0

    def push(self, key: Key, number: int, cost: float) -> None:
        self.numbers[key] = number
        heapq.heappush(self._heap, (self._floor + cost, number, key))
        if len(self._heap) > 2 * len(self.numbers) + 64:
            self._heap = [entry for entry in self._heap if self.numbers.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def pop(self) -> Key:
        while True:
            rank, number, key = heapq.heappop(self._heap)
            if self.numbers.get(key) == number:
                self._floor = max(self._floor, rank)
                del self.numbers[key]
                return key


class EvictionOrder(Generic[Key]):
    """Keys that may be evicted, each of a tenant."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = {} if weights is None else weights  # may change
        self._queues: dict[str, _Queue[Key]] = {}  # of tenants that have keys
        self._tenant_of: dict[Key, str] = {}
        self._next_number = 0
        self._newest = 0.0  # arrival of a request

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._tenant_of

    def members(self) -> KeysView[Key]:
        return self._tenant_of.keys()

    def saw(self, tenant: str, arrival_time: float) -> None:
        """A request of this tenant arrived."""
        self._newest = max(self._newest, arrival_time)
        if (queue := self._queues.get(tenant)) is not None:
            queue.seen = arrival_time

    def add(self, key: Key, tenant: str, cost: float) -> None:
        """Add a key that was used just now."""
        self._tenant_of[key] = tenant
        if (queue := self._queues.get(tenant)) is None:
            queue = self._queues[tenant] = _Queue(self._newest)
        queue.push(key, self._next_number, cost)
        self._next_number += 1

    def remove(self, key: Key) -> None:
        tenant = self._tenant_of.pop(key)
        queue = self._queues[tenant]
        del queue.numbers[key]
        if not queue.numbers:
            del self._queues[tenant]

    def pop(self, count: int) -> list[Key]:
        """Remove `count` keys: of tenants that stay away, then of those that have the most for their weight."""
        if len(self._queues) == 1:
            (tenant,) = self._queues
            return [self._pop_from(tenant) for _ in range(count)]
        tenants = [(*self._claim(tenant), tenant) for tenant in self._queues]
        heapq.heapify(tenants)
        keys: list[Key] = []
        while len(keys) < count:
            tenant = tenants[0][-1]
            keys.append(self._pop_from(tenant))
            if tenant in self._queues:
                heapq.heapreplace(tenants, (*self._claim(tenant), tenant))
            else:
                heapq.heappop(tenants)
        return keys

    def _claim(self, tenant: str) -> tuple[float, float, float]:
        """How good a tenant's claim to its keys is; the weakest loses one, of equals the one that came last."""
        queue = self._queues[tenant]
        away = queue.seen if self._newest - queue.seen > KEEP_S else self._newest
        return away, -len(queue.numbers) / self._weights.get(tenant, 1.0), -queue.seen

    def _pop_from(self, tenant: str) -> Key:
        queue = self._queues[tenant]
        key = queue.pop()
        del self._tenant_of[key]
        if not queue.numbers:
            del self._queues[tenant]
        return key

    def check_invariants(self) -> None:
        found = {key: tenant for tenant, queue in self._queues.items() for key in queue.numbers}
        assert found == self._tenant_of, "a key is lost, or in two queues"
        assert all(queue.numbers for queue in self._queues.values()), "a tenant without keys is listed"
