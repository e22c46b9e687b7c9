"""Who is next: the requests that wait for a slot, in the order they are to be tried.

Must not know: blocks, budgets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from evenflow.core.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


class FirstComeQueue:
    """First come, first served. A preempted request keeps the place that its arrival gives it."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_arrival)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.arrival, key=_arrival)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request!r} is not waiting")
        del self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
