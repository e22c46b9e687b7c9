"""Requests that wait for a slot, in order of rank (see `Planner.place`)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

rank = attrgetter("rank")


class Ranked(Protocol):
    rank: tuple[float, int]


RequestType = TypeVar("RequestType", bound=Ranked)


class RankedQueue(Generic[RequestType]):
    """A preempted request returns to the place that its rank gives it."""

    def __init__(self) -> None:
        self._requests: list[RequestType] = []

    def push(self, request: RequestType) -> None:
        insort(self._requests, request, key=rank)

    def remove(self, request: RequestType) -> None:
        index = bisect_left(self._requests, request.rank, key=rank)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"{request!r} is not waiting")
        del self._requests[index]

    def update(self, request: RequestType, rank: tuple[float, int]) -> None:
        """Move a waiting request to the place that this rank gives it."""
        if rank != request.rank:
            self.remove(request)
            request.rank = rank
            self.push(request)

    def __iter__(self) -> Iterator[RequestType]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)
