"""Which KV blocks are free, how many requests refer to the others, and what they hold.

A block holds the KV of `block_size` tokens in an executor's memory; here it is only a number. `eviction` says which
idle prefix goes first when clean blocks run out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from evenflow.core.eviction import EvictionOrder


class Content(NamedTuple):
    """What a published block holds."""

    block_hash: bytes
    tenant: str


OnChange = Callable[[int, Content, float], None]  # with the seconds that computing it again takes


class BlockPool:
    """Every block is in exactly one of five states:

    clean      no useful content; allocated first
    idle       unreferenced, but holds a published prefix; evicted when no block is clean
    held       referenced by one or more requests
    settling   unreferenced, but a step in flight may still touch it
    retired    out of service, because memory ran out; not counted in `num_blocks`
    """

    def __init__(
        self,
        num_blocks: int,
        weights: Mapping[str, float] | None = None,
        on_evict: OnChange | None = None,
        on_idle: OnChange | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._on_evict, self._on_idle = on_evict, on_idle
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._idle: EvictionOrder[int] = EvictionOrder(weights)
        self._references = [0] * num_blocks
        self._settling: deque[tuple[int, list[int]]] = deque()  # (last step that may touch them, blocks)
        self._retired: list[int] = []
        self._content: dict[int, Content] = {}  # of published blocks
        self._costs: dict[int, float] = {}  # seconds to compute a published block again
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return now."""
        return len(self._clean) + len(self._idle)

    @property
    def num_settling(self) -> int:
        return sum(len(blocks) for _, blocks in self._settling)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_settling

    def saw(self, tenant: str, arrival_time: float) -> None:
        """A request of this tenant arrived."""
        self._idle.saw(tenant, arrival_time)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, at most `num_free`. Evicts published prefixes when clean blocks run out."""
        num_clean = len(self._clean)
        if count > num_clean and count > self.num_free:
            raise ValueError(f"asked for {count} blocks with {self.num_free} free")
        blocks = [self._clean.pop() for _ in range(count if count <= num_clean else num_clean)]
        if count > num_clean:
            evicted = self._idle.pop(count - num_clean)
            for block in evicted:
                self._evict(block)
            blocks += evicted
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, block: int) -> None:
        content, cost = self._content.pop(block), self._costs.pop(block, 0.0)
        del self._block_of[content.block_hash]
        if self._on_evict is not None:
            self._on_evict(block, content, cost)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these published blocks."""
        for block in blocks:
            if self._references[block] == 0:
                self._idle.remove(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int], last_step_id: int | None, cost: float = 0.0) -> None:
        """Drop one reference to each. Unreferenced blocks are free once `last_step_id` is committed.

        `cost` is the seconds that computing one of them again takes. Of prefixes that share a block, the highest
        counts: otherwise a block could be evicted before those that are useless without it.
        """
        dropped = []
        for block in reversed(blocks):  # the end is evicted before the prefix, which others may share
            self._references[block] -= 1
            if cost > self._costs.get(block, 0.0) and block in self._content:
                self._costs[block] = cost
            if self._references[block] == 0:
                dropped.append(block)
        if last_step_id is None:
            self._free(dropped)
        elif dropped:
            self._settling.append((last_step_id, dropped))

    def settle(self, committed_step_id: int) -> None:
        """Free the blocks that this step was the last to touch."""
        while self._settling and self._settling[0][0] <= committed_step_id:
            self._free(self._settling.popleft()[1])

    def _free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if (content := self._content.get(block)) is not None:
                cost = self._costs.get(block, 0.0)
                self._idle.add(block, content.tenant, cost)
                if self._on_idle is not None:
                    self._on_idle(block, content, cost)
            else:
                self._clean.append(block)

    def publish(self, block: int, block_hash: bytes, tenant: str = "") -> None:
        """Register what a held block contains. A second block with the same content stays unpublished."""
        if block_hash not in self._block_of and block not in self._content:
            self._block_of[block_hash] = block
            self._content[block] = Content(block_hash, tenant)

    def forget(self, blocks: Iterable[int]) -> list[bytes]:
        """Unpublish these held blocks, which may contain wrong KV. Returns the hashes of those that were published."""
        hashes = [content.block_hash for block in blocks if (content := self._content.pop(block, None)) is not None]
        for block_hash in hashes:
            self._costs.pop(self._block_of.pop(block_hash), None)
        return hashes

    def retire(self, count: int) -> None:
        """Take up to this many free blocks out of service for good."""
        blocks = self.allocate(min(count, self.num_free))
        for block in blocks:
            self._references[block] = 0
        self._retired += blocks
        self.num_blocks -= len(blocks)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are published and not settling."""
        found = []
        lookup, idle = self._block_of.get, self._idle.members()
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None or (self._references[block] == 0 and block not in idle):
                break
            found.append(block)
        return found

    def is_published(self, block_hash: bytes) -> bool:
        """Settling blocks count: they can be found soon."""
        return block_hash in self._block_of

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these count as free."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def count_sole(self, blocks: Iterable[int]) -> int:
        """How many of these become free when one request releases them."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def check_invariants(self) -> None:
        """Each block is in exactly one state, and both directions of the hash index agree."""
        settling = [block for _, blocks in self._settling for block in blocks]
        held = [block for block, count in enumerate(self._references) if count > 0]
        self._idle.check_invariants()
        states = [*self._clean, *self._idle.members(), *settling, *held, *self._retired]
        assert sorted(states) == list(range(len(self._references))), "a block is lost or in two states"
        assert self.num_blocks == len(states) - len(self._retired), "the number of blocks is wrong"
        assert min(self._references, default=0) >= 0, "a block was released too often"
        hashes = {block: content.block_hash for block, content in self._content.items()}
        assert {block: h for h, block in self._block_of.items()} == hashes, "the hash index is one-sided"
        assert not any(block in self._content for block in self._clean), "a clean block is published"
        assert all(block in self._content for block in self._idle.members()), "an idle block is not published"
        assert self._costs.keys() <= self._content.keys(), "a block without content has a cost"
