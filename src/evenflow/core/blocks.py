"""Which KV blocks are free, how many requests refer to the others, and which one is evicted next.

A block holds the KV of `block_size` tokens in an executor's memory; here it is only a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Every block is in exactly one of four states:

    clean      no useful content; allocated first
    idle       unreferenced, but holds a published prefix; the least recently used is evicted first, except that
               who has an equal share of the idle blocks, or more, evicts their own
    held       referenced by one or more requests
    settling   unreferenced, but a step in flight may still touch it
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._idle: dict[int, None] = {}  # insertion order is eviction order
        self._idle_of: dict[bytes, dict[int, None]] = {}  # the same by owner; no owner without any
        self._owner_of: dict[int, bytes] = {}  # of published blocks
        self._references = [0] * num_blocks
        self._settling: deque[tuple[int, list[int]]] = deque()  # (last step that may touch them, blocks)
        self._hash_of: dict[int, bytes] = {}
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

    def allocate(self, count: int, owner: bytes = b"") -> list[int]:
        """Take `count` blocks, at most `num_free`. Evicts published prefixes when clean blocks run out."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks with {self.num_free} free")
        blocks = [self._clean.pop() if self._clean else self._evict(owner) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self, owner: bytes) -> int:
        """One who fills the cache with ever new prefixes displaces their own, not everybody's."""
        own = self._idle_of.get(owner, {})
        block = next(iter(own if len(own) * len(self._idle_of) >= len(self._idle) else self._idle))
        self._unidle(block)
        del self._owner_of[block]
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _unidle(self, block: int) -> None:
        owner = self._owner_of[block]
        del self._idle[block]
        del self._idle_of[owner][block]
        if not self._idle_of[owner]:
            del self._idle_of[owner]

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these published blocks."""
        for block in blocks:
            if self._references[block] == 0:
                self._unidle(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int], last_step_id: int | None) -> None:
        """Drop one reference to each. Unreferenced blocks are free once `last_step_id` is committed."""
        dropped = []
        for block in reversed(blocks):  # the end is evicted before the prefix, which others may share
            self._references[block] -= 1
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
            if block in self._hash_of:
                self._idle[block] = None
                self._idle_of.setdefault(self._owner_of[block], {})[block] = None
            else:
                self._clean.append(block)

    def publish(self, block: int, block_hash: bytes, owner: bytes = b"") -> None:
        """Register what a held block contains, and for whom. A second block with the same content stays unpublished."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._owner_of[block] = owner

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are published and not settling."""
        found = []
        lookup = self._block_of.get
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None or (self._references[block] == 0 and block not in self._idle):
                break
            found.append(block)
        return found

    def is_published(self, block_hash: bytes) -> bool:
        """Settling blocks count: they can be found soon."""
        return block_hash in self._block_of

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these count as free."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def check_invariants(self) -> None:
        """Each block is in exactly one state, and both directions of the hash index agree."""
        settling = [block for _, blocks in self._settling for block in blocks]
        held = [block for block, count in enumerate(self._references) if count > 0]
        states = self._clean + list(self._idle) + settling + held
        assert sorted(states) == list(range(self.num_blocks)), "a block is lost or in two states"
        assert min(self._references, default=0) >= 0, "a block was released too often"
        assert {block: h for h, block in self._block_of.items()} == self._hash_of, "the hash index is one-sided"
        assert not any(block in self._hash_of for block in self._clean), "a clean block is published"
        assert all(block in self._hash_of for block in self._idle), "an idle block is not published"
        by_owner = [block for blocks in self._idle_of.values() for block in blocks]
        assert sorted(by_owner) == sorted(self._idle), "the idle blocks by owner are not the idle blocks"
        assert self._owner_of.keys() == self._hash_of.keys(), "a published block has no owner"
