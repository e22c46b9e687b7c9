"""What clients make the server hold: connections that wait for them, and bytes. Both have a bound and an owner.

When there are too many, the owner with the most loses one of its own: of the connections that wait, the oldest; of
those that hold bytes, the largest. What an owner does costs itself first.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

MAX_WAITING = 4096  # connections that wait for their client, to send a request or to read a response
MAX_HELD_BYTES = 64 << 20  # of heads, bodies, outputs, and responses that are not read yet


class Connection(Protocol):
    @property
    def owner(self) -> str: ...

    def lose(self, reason: str) -> None:
        """End, because the server holds too much."""


def raise_file_limit(wanted: int) -> int:
    """Files that this process may open from now on. The usual 1,024 are for programs that cannot take more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    if soft != infinite and soft < wanted:
        soft = wanted if hard == infinite else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == infinite else soft


class _Shares:
    """An amount by connection, oldest first, and by owner."""

    def __init__(self) -> None:
        self._of: dict[Connection, tuple[str, int]] = {}
        self._by_owner: Counter[str] = Counter()
        self.total = 0

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._of

    def set(self, connection: Connection, amount: int) -> None:
        owner, before = connection.owner, 0
        if (known := self._of.get(connection)) is not None:
            was, before = known
            self._take(was, before)
        self._of[connection] = owner, amount
        self._by_owner[owner] += amount
        self.total += amount

    def remove(self, connection: Connection) -> None:
        if (known := self._of.pop(connection, None)) is not None:
            self._take(*known)

    def largest_share(self) -> Iterator[tuple[int, Connection]]:
        """The connections of the owner with the most, oldest first."""
        largest = max(self._by_owner, key=self._by_owner.__getitem__)
        return ((amount, connection) for connection, (owner, amount) in self._of.items() if owner == largest)

    def _take(self, owner: str, amount: int) -> None:
        self.total -= amount
        self._by_owner[owner] -= amount
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class Held:
    """What all connections of one server hold."""

    def __init__(self) -> None:
        self._most_waiting = min(MAX_WAITING, max(1, raise_file_limit(2 * MAX_WAITING) // 2))
        self._waiting = _Shares()
        self._bytes = _Shares()

    def wait(self, connection: Connection) -> None:
        """This connection waits for its client from now on, unless it does so already."""
        if connection in self._waiting:
            return
        self._waiting.set(connection, 1)
        if self._waiting.total > self._most_waiting:
            _, oldest = next(self._waiting.largest_share())
            self._end(oldest, "The server has too many connections that wait for you, and this one is the oldest.")

    def go_on(self, connection: Connection) -> None:
        """It does not wait any more."""
        self._waiting.remove(connection)

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """It holds this much now."""
        self._bytes.set(connection, num_bytes)
        while self._bytes.total > MAX_HELD_BYTES:
            _, largest = max(self._bytes.largest_share(), key=lambda one: one[0])
            self._end(largest, "The server holds too much for its clients, and the most for you: retry later.")

    def discard(self, connection: Connection) -> None:
        """It is closed."""
        self._waiting.remove(connection)
        self._bytes.remove(connection)

    def _end(self, connection: Connection, reason: str) -> None:
        self.discard(connection)
        connection.lose(reason)
