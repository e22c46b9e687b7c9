"""Takes turns among clients: what one has sent, however much, delays another's by one item."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Lanes(Generic[Item]):
    """A queue for each client that waits. The one whose turn it is comes first."""

    def __init__(self) -> None:
        self._lanes: dict[str, deque[Item]] = {}

    def __len__(self) -> int:
        """Clients that wait."""
        return len(self._lanes)

    def put(self, client: str, item: Item) -> None:
        self._lanes.setdefault(client, deque()).append(item)

    def take(self) -> Item:
        client = next(iter(self._lanes))
        lane = self._lanes.pop(client)
        item = lane.popleft()
        if lane:
            self._lanes[client] = lane  # behind the others
        return item
