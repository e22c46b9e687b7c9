"""Moves blocks between the pool and the tier, ahead of the requests that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from evenflow.core.blocks import BlockPool
from evenflow.core.plan import NO_MOVES, TierMoves, TierResult
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.request import Request
from evenflow.core.tier import Tier

PrefillPrice = Callable[[int, int], float]  # seconds of a chunk, by its start and length


class BlockMover:
    """Decides what is restored, and publishes it when it is there. Without a tier it does nothing."""

    def __init__(
        self, pool: BlockPool, prefix_cache: PrefixCache, tier: Tier | None, block_size: int, price: PrefillPrice
    ) -> None:
        self._pool, self._prefix_cache, self._tier = pool, prefix_cache, tier
        self._block_size, self._price = block_size, price
        self.num_recomputed = 0  # blocks that the tier had when they were computed
        self._waiting: list[Request] = []  # could start in this step, but for what the tier has of them

    def start_step(self) -> None:
        self._waiting.clear()

    @property
    def needs_step(self) -> bool:
        """Is a step needed to move blocks, even one without rows?"""
        return self.is_restoring or bool(self._waiting) or (self._tier is not None and self._tier.is_behind)

    @property
    def is_restoring(self) -> bool:
        return self._tier is not None and self._tier.num_returning > 0

    def delays(self, request: Request, cached: Sequence[int]) -> bool:
        """Should a request wait for its next blocks instead of computing them? They are then restored with this step.

        At most once per wait for a slot: otherwise two requests could evict each other's blocks forever.
        """
        if request.restored_epoch == request.epoch or not self._stored_blocks(request, cached):
            return False
        self._waiting.append(request)
        return True

    def _stored_blocks(self, request: Request, cached: Sequence[int]) -> list[bytes]:
        """What the tier has of its next blocks, if restoring these takes less time than computing them."""
        if self._tier is None:
            return []
        stored, num_blocks = self._prefix_cache.stored_after(request, len(cached))
        if not stored:
            return []
        start, end = len(cached) * self._block_size, num_blocks * self._block_size
        computing = self._price(start, request.num_known - start) - self._price(end, request.num_known - end)
        return stored[: self._tier.num_to_restore(len(stored), max(0.0, computing))]

    def on_admit(self, request: Request) -> None:
        """Count the blocks that a starting request computes although the tier has them."""
        if self._tier is not None:
            stored, _ = self._prefix_cache.stored_after(request, len(self._prefix_cache.find(request)))
            self.num_recomputed += len(stored)
            if request.restored_epoch != request.epoch:  # it did not wait for them
                self._tier.restore_time.num_refused += len(stored)

    def take_moves(self) -> TierMoves:
        """The step's moves. Call this once all its rows have their blocks: restored blocks take the rest."""
        if self._tier is None:
            return NO_MOVES
        for request in self._waiting:
            request.restored_epoch = request.epoch
        for request in self._waiting:
            cached = self._prefix_cache.find(request)
            stored = self._stored_blocks(request, cached)
            if len(stored) > self._pool.num_free - self._pool.count_idle(cached):
                break
            self._pool.hold(cached)  # not evicted for its own rest
            self._tier.restore(stored, self._pool.allocate)
            self._pool.release(cached, None)
        self._waiting.clear()
        return self._tier.take_moves()

    def forget(self, blocks: Iterable[int]) -> None:
        """These held blocks may contain wrong KV: no request gets it, from the pool or from the tier."""
        hashes = self._pool.forget(blocks)
        if self._tier is not None:
            self._tier.forget(hashes)

    def commit(self, result: TierResult) -> None:
        """Publish what came back; free the blocks of what did not."""
        if self._tier is None:
            return
        restored, lost = self._tier.commit(result)
        for one in restored:
            self._pool.publish(one.block, one.content.block_hash, one.content.tenant)
        for one in reversed(restored):  # as on any release: the end of a prefix is evicted first
            self._pool.release([one.block], None, one.cost)
        self._pool.release([one.block for one in lost], None)
