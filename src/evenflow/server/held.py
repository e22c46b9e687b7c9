"""What clients make the server hold: connections that wait for them, and bytes. Both have a bound and an owner.

When there are too many, the owner with the most loses one of its own: of the connections that wait, the oldest; of
those that hold bytes, one of the largest. What an owner does costs itself first.
"""

from __future__ import annotations

import resource
from collections import Counter
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
    """An amount by connection, and by owner. No call looks at all connections: a flood makes thousands of calls."""

    def __init__(self) -> None:
        self._of: dict[Connection, tuple[str, int]] = {}
        self._by_owner: Counter[str] = Counter()
        # Of an owner, by the amount's number of bits: connections, oldest first.
        self._alike: dict[str, dict[int, dict[Connection, None]]] = {}
        self.total = 0

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._of

    def set(self, connection: Connection, amount: int) -> None:
        """The connection keeps its age if this changes nothing."""
        owner, before = connection.owner, 0
        if (known := self._of.get(connection)) is not None:
            was, before = known
            if known == (owner, amount):
                return
            self._take(connection, was, before)
        self._of[connection] = owner, amount
        self._alike.setdefault(owner, {}).setdefault(amount.bit_length(), {})[connection] = None
        self._by_owner[owner] += amount
        self.total += amount

    def remove(self, connection: Connection) -> None:
        if (known := self._of.pop(connection, None)) is not None:
            self._take(connection, *known)

    def largest(self) -> Connection:
        """Of the owner with the most, the oldest with more than half of its largest amount."""
        alike = self._alike[max(self._by_owner, key=self._by_owner.__getitem__)]
        return next(iter(alike[max(alike)]))

    def _take(self, connection: Connection, owner: str, amount: int) -> None:
        alike, num_bits = self._alike[owner], amount.bit_length()
        del alike[num_bits][connection]
        if not alike[num_bits]:
            del alike[num_bits]
        self.total -= amount
        self._by_owner[owner] -= amount
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._alike[owner]


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
            reason = "The server has too many connections that wait for you, and this one is the oldest."
            self._end(self._waiting.largest(), reason)

    def know(self, connection: Connection) -> None:
        """Its owner has changed: its key is known now."""
        if connection in self._waiting:
            self._waiting.set(connection, 1)

    def go_on(self, connection: Connection) -> None:
        """It does not wait any more."""
        self._waiting.remove(connection)

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """It holds this much now."""
        self._bytes.set(connection, num_bytes)
        while self._bytes.total > MAX_HELD_BYTES:
            reason = "The server holds too much for its clients, and the most for you: retry later."
            self._end(self._bytes.largest(), reason)

    def discard(self, connection: Connection) -> None:
        """It is closed."""
        self._waiting.remove(connection)
        self._bytes.remove(connection)

    def _end(self, connection: Connection, reason: str) -> None:
        self.discard(connection)
        connection.lose(reason)
