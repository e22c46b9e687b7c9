"""Who is next: the requests that wait for a slot, by rank.

A rank is a moment: the request's arrival, plus the patience its own size calls for (see `Scheduler.add`). Without
patience that is first come, first served. With it the short pass the long, but only those that arrive within the long
one's patience: later arrivals have later ranks, so nobody starves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from evenflow.core.request import Request


def rank(request: Request) -> tuple[float, int]:
    return request.rank


class RankedQueue:
    """Requests in order of rank. A preempted one comes back to the place that its rank gives it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.rank, key=rank)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request!r} is not waiting")
        del self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
