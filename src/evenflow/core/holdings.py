"""How many slots and KV blocks each tenant's running requests hold."""

from __future__ import annotations

from collections.abc import Iterable

from evenflow.core.request import Request


class Holdings:
    """A tenant's dominant holding is the larger of its share of all slots and its share of all blocks."""

    def __init__(self, running: Iterable[Request], num_slots: int, num_blocks: int, block_size: int) -> None:
        self._num_slots = num_slots
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._held: dict[str, tuple[int, int]] = {}  # slots and blocks, by tenant
        for request in running:
            self._change(request, 1)

    def _change(self, request: Request, sign: int) -> None:
        slots, blocks = self._held.get(request.tenant, (0, 0))
        self._held[request.tenant] = slots + sign, blocks + sign * len(request.block_ids)

    def drop(self, request: Request) -> None:
        """A running request gives up what it holds."""
        self._change(request, -1)

    def dominant(self, tenant: str) -> float:
        slots, blocks = self._held.get(tenant, (0, 0))
        return max(slots / self._num_slots, blocks / self._num_blocks)

    def dominant_with(self, request: Request) -> float:
        """Its tenant's dominant holding if this request ran as well."""
        slots, blocks = self._held.get(request.tenant, (0, 0))
        blocks += -(-request.num_known // self._block_size)
        return max((slots + 1) / self._num_slots, blocks / self._num_blocks)
