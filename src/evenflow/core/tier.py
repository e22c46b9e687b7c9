"""Which evicted prefixes are kept outside the pool, in a slower and larger memory, and which are on their way back.

A block goes there when it is evicted, if moving it out and back takes less time than computing it again. So the KV of
preempted requests and of paused conversations comes back, unless recomputing is cheaper. The executor decides what the
tier is made of (host memory, disk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from evenflow.core.blocks import Content
from evenflow.core.eviction import EvictionOrder
from evenflow.core.plan import Save, TierMoves, TierResult

_KEPT = 0.9  # of a measured time; the rest is the newest sample
_FEW = 8  # blocks that are moved at a time though nothing evicts them, or though moves seem to take too long
_MAX_REFUSED = 1024  # blocks without a move, because moves take too long: a few are tried then


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """The size of a tier, how fast it is, and what it holds at the start."""

    num_blocks: int
    save_seconds: float  # to move one block out, measured
    restore_seconds: float
    most_saving: int = 1 << 20  # blocks that may be copied and not stored yet
    keeps_all: bool = False  # save prefixes when they become idle, not when they are evicted: for the next start
    contents: tuple[Content, ...] = ()  # from an earlier run, the least recently used first


@dataclass(slots=True)
class MoveTime:
    """Seconds that a block takes one way, learned from moves. A disk may be slow only for a while, so what is known is
    in doubt when it has prevented many moves: a few are tried then, and what they take counts alone."""

    seconds: float
    num_refused: int = 0  # blocks since one moved

    @property
    def is_in_doubt(self) -> bool:
        return self.num_refused >= _MAX_REFUSED

    @property
    def least(self) -> float:
        """What a move takes, as far as this is known."""
        return 0.0 if self.is_in_doubt else self.seconds

    def learn(self, seconds: float) -> None:
        """The mean of moves; 0 if there were none."""
        if seconds:
            self.seconds = seconds if self.is_in_doubt else _KEPT * self.seconds + (1 - _KEPT) * seconds
            self.num_refused = 0


class Returning(NamedTuple):
    """A block of the pool that is being filled."""

    block: int
    content: Content
    cost: float


class Tier:
    """Knows what is stored, and collects the moves of the next step. Shares of tenants hold as in the pool."""

    def __init__(self, config: TierConfig, weights: Mapping[str, float] | None = None) -> None:
        self._num_blocks, self._most_saving = config.num_blocks, config.most_saving
        self.save_time, self.restore_time = MoveTime(config.save_seconds), MoveTime(config.restore_seconds)
        self._order: EvictionOrder[bytes] = EvictionOrder(weights)
        self._stored: dict[bytes, tuple[str, float]] = {}  # tenant and cost
        self._returning: dict[bytes, Returning] = {}
        self._keeps_all = config.keeps_all
        self._offered: dict[bytes, tuple[int, Content, float]] = {}  # idle in the pool, and not stored
        self._num_saving = 0
        self._saves: dict[bytes, Save] = {}
        self._restores: list[tuple[int, bytes]] = []
        self._drops: dict[bytes, None] = {}
        for content in config.contents:
            self._add(content, 0.0)

    @property
    def num_stored(self) -> int:
        return len(self._stored)

    @property
    def num_returning(self) -> int:
        return len(self._returning)

    @property
    def is_behind(self) -> bool:
        """Are there prefixes left to store or to drop, for which a step is due even without rows?"""
        return bool(self._offered or self._drops)

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self._stored

    def is_returning(self, block_hash: bytes) -> bool:
        return block_hash in self._returning

    def saw(self, tenant: str, arrival_time: float) -> None:
        """A request of this tenant arrived."""
        self._order.saw(tenant, arrival_time)

    def take(self, block: int, content: Content, cost: float) -> None:
        """The pool evicts this block, which would take `cost` seconds to compute again."""
        self._offered.pop(content.block_hash, None)
        if content.block_hash in self._stored:
            self._touch(content, cost)
        elif cost >= self.save_time.least + self.restore_time.least and self._may_save:
            self._saves[content.block_hash] = Save(block, *content)
            self._add(content, cost)
        else:
            self.save_time.num_refused += 1
            self.restore_time.num_refused += 1

    @property
    def _may_save(self) -> bool:
        return not self.save_time.is_in_doubt or self._num_saving + len(self._saves) < _FEW

    def offer(self, block: int, content: Content, cost: float) -> None:
        """This block of the pool is idle now."""
        if self._keeps_all and content.block_hash not in self._stored:
            self._offered[content.block_hash] = block, content, cost

    def num_to_restore(self, num_stored: int, seconds: float) -> int:
        """The number of a request's next blocks to restore; computing all of them takes these seconds."""
        if self.restore_time.is_in_doubt:
            return min(num_stored, _FEW)
        return num_stored if self.restore_time.seconds * num_stored <= seconds else 0

    def restore(self, hashes: Sequence[bytes], allocate: Callable[[int], Sequence[int]]) -> None:
        """Bring these back into blocks of the pool. Blocks evicted to make room cannot displace them here."""
        for block_hash in hashes:
            self._order.remove(block_hash)
        for block_hash, block in zip(hashes, allocate(len(hashes)), strict=True):
            tenant, cost = self._stored[block_hash]
            self._returning[block_hash] = Returning(block, Content(block_hash, tenant), cost)
            self._restores.append((block, block_hash))

    def forget(self, hashes: Iterable[bytes]) -> None:
        """These blocks of the pool may hold wrong KV, and so may copies, except one on its way back, which is older."""
        for block_hash in hashes:
            self._offered.pop(block_hash, None)
            self._give_up(block_hash)

    def take_moves(self) -> TierMoves:
        for block_hash in list(self._offered)[: max(0, _FEW - self._num_saving)]:
            self.take(*self._offered[block_hash])
        # The ends of prefixes are evicted first, and are worth nothing without their starts.
        for block_hash in list(self._saves)[: max(0, self._num_saving + len(self._saves) - self._most_saving)]:
            self._give_up(block_hash)
        moves = TierMoves(tuple(self._saves.values()), tuple(self._restores), tuple(self._drops))
        self._saves, self._restores, self._drops = {}, [], {}
        return moves

    def commit(self, result: TierResult) -> tuple[list[Returning], list[Returning]]:
        """What came back, and what will not."""
        self._num_saving = result.num_saving
        self.save_time.learn(result.save_seconds)
        self.restore_time.learn(result.restore_seconds)
        restored = [self._returning.pop(block_hash) for block_hash in result.restored]
        for one in reversed(restored):  # as in the pool, the end of a prefix goes first
            self._order.add(one.content.block_hash, one.content.tenant, one.cost)
        lost = [self._returning.pop(block_hash) for block_hash in result.lost]
        for one in lost:
            del self._stored[one.content.block_hash]
        self._make_room()
        return restored, lost

    def _touch(self, content: Content, cost: float) -> None:
        if content.block_hash in self._order:
            self._order.remove(content.block_hash)
            cost = max(cost, self._stored[content.block_hash][1])
            self._stored[content.block_hash] = content.tenant, cost
            self._order.add(content.block_hash, content.tenant, cost)

    def _add(self, content: Content, cost: float) -> None:
        self._stored[content.block_hash] = content.tenant, cost
        self._order.add(content.block_hash, content.tenant, cost)
        self._make_room()

    def _make_room(self) -> None:
        excess = min(len(self._stored) - self._num_blocks, len(self._order))
        for block_hash in self._order.pop(excess) if excess > 0 else ():
            self._drop(block_hash)

    def _give_up(self, block_hash: bytes) -> None:
        """Drop it if it is stored, and not on its way back."""
        if block_hash in self._order:
            self._order.remove(block_hash)
            self._drop(block_hash)

    def _drop(self, block_hash: bytes) -> None:
        del self._stored[block_hash]
        if self._saves.pop(block_hash, None) is None:
            self._drops[block_hash] = None

    def check_invariants(self) -> None:
        self._order.check_invariants()
        assert {*self._order.members(), *self._returning} == self._stored.keys(), "a stored block is in no state"
        assert not self._order.members() & self._returning.keys(), "a block that returns may be dropped"
        assert len(self._stored) <= self._num_blocks + len(self._returning), "the tier is larger than it may be"
