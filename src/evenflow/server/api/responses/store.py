"""Past responses in memory, for clients that continue or read them by their ids.

Bounded by count and bytes. When room is needed, the largest share loses its oldest response: a flood displaces its own.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from evenflow.server.access import Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """All parts are JSON, so their size is known."""

    owner: str  # who may read it
    tenant: str
    share: str  # whose bounds it counts against
    response: bytes
    input_items: bytes  # the whole conversation before it
    output_items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.output_items)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBounds:
    """Responses and bytes of one share, and of all."""

    max_responses: int = 1024
    max_bytes: int = 8 << 20
    max_total_responses: int = 4096
    max_total_bytes: int = 32 << 20


class ResponseStore:
    """The last responses of each share."""

    def __init__(self, bounds: StoreBounds | None = None) -> None:
        self._bounds = bounds or StoreBounds()
        self._shares: dict[str, OrderedDict[str, StoredResponse]] = {}  # by id, oldest first
        self._share_bytes: dict[str, int] = {}
        self._share_of: dict[str, str] = {}  # by id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._share_of)

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a response of this size is kept: one that alone is over a share's bound is not."""
        return num_bytes <= self._bounds.max_bytes

    def add(self, response_id: str, stored: StoredResponse) -> None:
        bounds, share = self._bounds, stored.share
        if not self.may_keep(stored.num_bytes):
            return
        self._shares.setdefault(share, OrderedDict())[response_id] = stored
        self._share_bytes[share] = self._share_bytes.get(share, 0) + stored.num_bytes
        self._share_of[response_id] = share
        self.num_bytes += stored.num_bytes
        while self._share_bytes[share] > bounds.max_bytes or len(self._shares[share]) > bounds.max_responses:
            self._remove_oldest(share)
        while self.num_bytes > bounds.max_total_bytes:
            self._remove_oldest(max(self._share_bytes, key=self._share_bytes.__getitem__))
        while len(self) > bounds.max_total_responses:
            self._remove_oldest(max(self._shares, key=lambda one: len(self._shares[one])))

    def find(self, response_id: str, caller: Caller) -> StoredResponse | None:
        """The response if this caller made it."""
        share = self._share_of.get(response_id)
        found = None if share is None else self._shares[share][response_id]
        return found if found is not None and found.owner == caller.client else None

    def remove(self, response_id: str) -> None:
        share = self._share_of.pop(response_id)
        num_bytes = self._shares[share].pop(response_id).num_bytes
        self._share_bytes[share] -= num_bytes
        self.num_bytes -= num_bytes
        if not self._shares[share]:
            del self._shares[share], self._share_bytes[share]

    def _remove_oldest(self, share: str) -> None:
        self.remove(next(iter(self._shares[share])))
