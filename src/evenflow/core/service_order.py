"""Who is next and who yields: the order of service of evenflow's own scheduler.

`service_lines` says who is next. Nothing here touches blocks, slots or steps: the scheduler asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from evenflow.core.holdings import Holdings
from evenflow.core.queue import rank
from evenflow.core.request import Request
from evenflow.core.service_lines import ServiceLines

Start = tuple[Request, int]  # a prompt, and where its next chunk starts


class ServiceOrder(ServiceLines[Request]):
    """The unfinished requests of one scheduler, in order of service."""

    def by_urgency(self, requests: Iterable[Request]) -> list[Request]:
        return sorted(requests, key=lambda one: (one.account.level, one.rank))

    def goes_before(self, request: Request, other: Request) -> bool:
        """Is its level more urgent?"""
        return request.account.level < other.account.level

    def is_held_up(self, request: Request, producer: Request, prompts: Iterable[Request]) -> bool:
        """Is one of these prompts, of another tenant, served before `producer`, although the tenant of `request` would
        be next even after all of its prompt?"""
        if request.account.level != producer.account.level or request.tenant == producer.tenant:
            return False
        level, counter, _ = self._standing(request.account)
        after = level, counter + self._prefill_left(request) / self._weight(request.tenant)
        end = self._standing(producer.account)[:2]
        return any(after <= self._standing(one.account)[:2] < end for one in prompts)

    def first_to_yield(self, running: Sequence[Request], holdings: Callable[[], Holdings]) -> Request:
        """Who gives its blocks up when a decode finds none: the youngest of the least urgent level.

        Among several tenants, of the one that holds the most for its weight. The oldest of the level never yields to a
        younger one, so it makes progress, and eventually all do.
        """
        if self.is_shared:
            level = max(one.account.level for one in running)
            running = [one for one in running if one.account.level == level]
            if len({one.tenant for one in running}) > 1:
                running = self._of_largest(running, holdings())
        return max(running, key=rank)

    def _of_largest(self, running: Sequence[Request], held: Holdings) -> list[Request]:
        oldest = min(running, key=rank)
        others = [one for one in running if one is not oldest]
        largest = max(others, key=lambda one: (self._held(held, one.tenant), one.tenant)).tenant
        return [one for one in others if one.tenant == largest]

    def _held(self, held: Holdings, tenant: str) -> float:
        return held.dominant(tenant) / self._weight(tenant)

    def yielding(self, request: Request, running: Sequence[Request], held: Holdings) -> Iterator[Request]:
        """Running requests that yield to a waiting one, in this order: those of less urgent classes; then those of
        tenants that, even without them, hold no less for their weight than its own tenant with it.

        Prompts yield before streams, young ones before old ones. `held` follows as they do.
        """
        level = self._classes[request.account.service_class].level

        def readiness(one: Request) -> tuple[int, bool, tuple[float, int]]:
            return one.account.level, one.is_prompt, one.rank

        for one in sorted((one for one in running if one.account.level > level), key=readiness, reverse=True):
            held.drop(one)
            yield one
        peers = sorted((one for one in running if one.account.level == level), key=readiness)
        others = [one for one in peers if one.tenant != request.tenant and one is not min(peers, key=rank)]
        own = held.dominant_with(request) / self._weight(request.tenant)
        while others:
            largest = max(others, key=lambda one: (self._held(held, one.tenant), one.tenant)).tenant
            one = [one for one in others if one.tenant == largest][-1]
            held.drop(one)
            if self._held(held, largest) < own:
                return
            others.remove(one)
            yield one

    def may_pass(self, request: Request, blocked: Request, held: Holdings) -> bool:
        """May it take memory although `blocked`, which is ahead in line, does not fit? A prompt that waits for its own
        tenant's others to make room holds up no tenant with less."""
        if request.account.level != blocked.account.level or request.tenant == blocked.tenant:
            return False
        own = held.dominant_with(request) / self._weight(request.tenant)
        return own <= self._held(held, blocked.tenant)
