"""Which replica a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count

from evenflow.core.request import Request
from evenflow.core.scheduler import Scheduler
from evenflow.errors import InvalidInput
from evenflow.simulation.load import LoadRequest

Router = Callable[[Request, Sequence[Scheduler]], int]
# A replica with more of the prefix is passed over if it has this many more unfinished requests than the least loaded.
_MAX_AHEAD = 8


def round_robin() -> Router:
    numbers = count()
    return lambda request, replicas: next(numbers) % len(replicas)


def _least_loaded(request: Request, replicas: Sequence[Scheduler]) -> int:
    return min(range(len(replicas)), key=lambda number: len(replicas[number].requests))


def _prefix_aware(request: Request, replicas: Sequence[Scheduler]) -> int:
    """The one with most of its prefix, among those that are not far busier than the least loaded."""
    least = min(len(one.requests) for one in replicas)
    able = [number for number, one in enumerate(replicas) if len(one.requests) <= least + _MAX_AHEAD]

    def standing(number: int) -> tuple[int, int]:
        return -replicas[number].prefix_cache.count_published(request), len(replicas[number].requests)

    return min(able, key=standing)


def _replica_of_tenant(tenant: str, num_replicas: int) -> int:
    return int.from_bytes(blake2b(tenant.encode(), digest_size=8).digest()) % num_replicas


def fixed_routes(router: str, requests: Sequence[LoadRequest], num_replicas: int) -> list[int] | None:
    """The replica of each request in order of arrival; None if that depends on the run."""
    if router == "tenant":
        return [_replica_of_tenant(one.tenant, num_replicas) for one in requests]
    if router == "round-robin" and all(one.arrival_s is not None for one in requests):
        return [number % num_replicas for number in range(len(requests))]
    return None


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": lambda: _least_loaded,
    "prefix": lambda: _prefix_aware,
    "tenant": lambda: lambda request, replicas: _replica_of_tenant(request.tenant, len(replicas)),
}


def router_of(name: str) -> Router:
    if name not in ROUTERS:
        raise InvalidInput(f"Got --router {name!r} but expected one of: {', '.join(ROUTERS)}.")
    return ROUTERS[name]()
