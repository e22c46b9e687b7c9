"""Which KV blocks are free, who refers to the others, and which one is evicted next.

A block holds the KV of `block_size` tokens somewhere in an executor; here it is only a number.
Must not know: requests, tokens, where the memory is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Every block is in exactly one of four states:

    clean      nothing of worth in it; taken first
    idle       nobody refers to it, but it holds a published prefix; evicted longest unused first
    held       one request or more refer to it
    settling   nobody refers to it, but a step in flight may still touch it
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._idle: dict[int, None] = {}  # insertion order is eviction order
        self._references = [0] * num_blocks
        self._settling: deque[tuple[int, list[int]]] = deque()  # (last step that may touch them, blocks)
        self._num_settling = 0
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give now."""
        return len(self._clean) + len(self._idle)

    @property
    def num_settling(self) -> int:
        return self._num_settling

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self._num_settling

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting published prefixes where clean ones run out. Ask `num_free` first."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks with {self.num_free} free")
        blocks = [self._clean.pop() if self._clean else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _evict(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        del self._block_of[self._hash_of.pop(block)]
        return block

    def hold(self, blocks: Iterable[int]) -> None:
        """Refer to published blocks once more."""
        for block in blocks:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int], last_step_id: int | None) -> None:
        """Drop one reference to each; blocks that nobody refers to are free once `last_step_id` is committed.

        The end of a sequence is released first, so that it is evicted before the prefix that others may share.
        """
        dropped = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                dropped.append(block)
        if last_step_id is None:
            self._free(dropped)
        elif dropped:
            self._settling.append((last_step_id, dropped))
            self._num_settling += len(dropped)

    def settle(self, committed_step_id: int) -> None:
        """A step was committed: what it was the last to touch is free."""
        while self._settling and self._settling[0][0] <= committed_step_id:
            _, blocks = self._settling.popleft()
            self._num_settling -= len(blocks)
            self._free(blocks)

    def _free(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._clean.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Say what a held block contains. A second block of the same content stays unpublished."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are published and can be held now."""
        found = []
        lookup = self._block_of.get
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None or (self._references[block] == 0 and block not in self._idle):
                break
            found.append(block)
        return found

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these would leave the free ones if held."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def check_invariants(self) -> None:
        """Each block in exactly one state, and both directions of the hash index agree."""
        settling = [block for _, blocks in self._settling for block in blocks]
        held = [block for block, count in enumerate(self._references) if count > 0]
        states = self._clean + list(self._idle) + settling + held
        assert sorted(states) == list(range(self.num_blocks)), "a block is lost or in two states"
        assert min(self._references, default=0) >= 0, "a block was released too often"
        assert self._num_settling == len(settling)
        assert {block: h for h, block in self._block_of.items()} == self._hash_of, "the hash index is one-sided"
        assert not any(block in self._hash_of for block in self._clean), "a clean block is published"
        assert all(block in self._hash_of for block in self._idle), "an idle block is not published"
