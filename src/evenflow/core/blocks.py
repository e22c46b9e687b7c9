"""Which KV blocks are free, how many requests refer to the others, and which one is evicted next.

A block holds the KV of `block_size` tokens in an executor's memory; here it is only a number. Idle prefixes are evicted
from the tenant that has the most of them for its weight, so a flood of one tenant's prompts evicts its own: what
another has is safe up to its share. A tenant that stays away loses this protection.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

# A tenant's cached prefixes are safe for this long after its last request arrived.
KEEP_S = 600.0


class BlockPool:
    """Every block is in exactly one of five states:

    clean      no useful content; allocated first
    idle       unreferenced, but holds a published prefix; a tenant's least recently used is evicted first
    held       referenced by one or more requests
    settling   unreferenced, but a step in flight may still touch it
    retired    out of service, because memory ran out; not counted in `num_blocks`
    """

    def __init__(self, num_blocks: int, weights: Mapping[str, float] | None = None) -> None:
        self.num_blocks = num_blocks
        self._weights = weights or {}
        self._clean = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first
        self._idle: dict[str, dict[int, None]] = {}  # by tenant; insertion order is eviction order
        self._num_idle = 0
        self._tenant_of: dict[int, str] = {}  # of published blocks
        self._seen: dict[str, float] = {}  # when each tenant's last request arrived
        self._newest = 0.0  # of these
        self._references = [0] * num_blocks
        self._settling: deque[tuple[int, list[int]]] = deque()  # (last step that may touch them, blocks)
        self._retired: list[int] = []
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can return now."""
        return len(self._clean) + self._num_idle

    @property
    def num_settling(self) -> int:
        return sum(len(blocks) for _, blocks in self._settling)

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free - self.num_settling

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, at most `num_free`. Evicts published prefixes when clean blocks run out."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks with {self.num_free} free")
        num_clean = len(self._clean)
        blocks = [self._clean.pop() for _ in range(count if count <= num_clean else num_clean)]
        if count > num_clean:
            blocks += self._evict(count - num_clean)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def saw(self, tenant: str, arrival_time: float) -> None:
        """A request of this tenant arrived."""
        self._newest = max(self._newest, arrival_time)
        self._seen.pop(tenant, None)
        self._seen[tenant] = arrival_time
        longest_away = next(iter(self._seen))
        if self._newest - self._seen[longest_away] > KEEP_S and longest_away not in self._idle:
            del self._seen[longest_away]

    def _evict(self, count: int) -> list[int]:
        """Take these blocks from tenants that stay away, then from those that have the most for their weight."""
        if len(self._idle) == 1:
            (tenant,) = self._idle
            return [self._evict_from(tenant) for _ in range(count)]
        tenants = [(*self._claim(tenant), tenant) for tenant in self._idle]
        heapq.heapify(tenants)
        blocks: list[int] = []
        while len(blocks) < count:
            tenant = tenants[0][-1]
            blocks.append(self._evict_from(tenant))
            if tenant in self._idle:
                heapq.heapreplace(tenants, (*self._claim(tenant), tenant))
            else:
                heapq.heappop(tenants)
        return blocks

    def _claim(self, tenant: str) -> tuple[float, float, float]:
        """How good a tenant's claim to its idle blocks is; the weakest loses one, of equals the one that came last."""
        seen = self._seen.get(tenant, -KEEP_S)
        away = seen if self._newest - seen > KEEP_S else self._newest
        return away, -len(self._idle[tenant]) / self._weights.get(tenant, 1.0), -seen

    def _evict_from(self, tenant: str) -> int:
        block = next(iter(self._idle[tenant]))
        self._unidle(block)
        del self._block_of[self._hash_of.pop(block)]
        del self._tenant_of[block]
        return block

    def _unidle(self, block: int) -> None:
        tenant = self._tenant_of[block]
        del self._idle[tenant][block]
        self._num_idle -= 1
        if not self._idle[tenant]:
            del self._idle[tenant]

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
                self._idle.setdefault(self._tenant_of[block], {})[block] = None
                self._num_idle += 1
            else:
                self._clean.append(block)

    def publish(self, block: int, block_hash: bytes, tenant: str = "") -> None:
        """Register what a held block contains. A second block with the same content stays unpublished."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._tenant_of[block] = tenant

    def forget(self, blocks: Iterable[int]) -> None:
        """Publish these held blocks no more: what they contain may be wrong."""
        for block in blocks:
            if (block_hash := self._hash_of.pop(block, None)) is not None:
                del self._block_of[block_hash], self._tenant_of[block]

    def retire(self, count: int) -> None:
        """Take this many blocks out of service for good, as far as they are free."""
        blocks = self.allocate(min(count, self.num_free))
        for block in blocks:
            self._references[block] = 0
        self._retired += blocks
        self.num_blocks -= len(blocks)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of leading hashes that are published and not settling."""
        found = []
        lookup = self._block_of.get
        for block_hash in hashes:
            block = lookup(block_hash)
            if block is None or (self._references[block] == 0 and not self._is_idle(block)):
                break
            found.append(block)
        return found

    def _is_idle(self, block: int) -> bool:
        return block in self._idle.get(self._tenant_of[block], ())

    def is_published(self, block_hash: bytes) -> bool:
        """Settling blocks count: they can be found soon."""
        return block_hash in self._block_of

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of these count as free."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def count_sole(self, blocks: Iterable[int]) -> int:
        """How many of these come free when one request releases them."""
        return sum(1 for block in blocks if self._references[block] == 1)

    def check_invariants(self) -> None:
        """Each block is in exactly one state, and both directions of the hash index agree."""
        settling = [block for _, blocks in self._settling for block in blocks]
        held = [block for block, count in enumerate(self._references) if count > 0]
        idle = [block for blocks in self._idle.values() for block in blocks]
        states = self._clean + idle + settling + held + self._retired
        assert sorted(states) == list(range(len(self._references))), "a block is lost or in two states"
        assert self.num_blocks == len(states) - len(self._retired), "the number of blocks is wrong"
        assert min(self._references, default=0) >= 0, "a block was released too often"
        assert {block: h for h, block in self._block_of.items()} == self._hash_of, "the hash index is one-sided"
        assert not any(block in self._hash_of for block in self._clean), "a clean block is published"
        assert all(block in self._hash_of for block in idle), "an idle block is not published"
        assert len(idle) == self._num_idle, "the number of idle blocks is wrong"
        assert self._tenant_of.keys() == self._hash_of.keys(), "a published block has no tenant"
        assert all(self._idle.values()), "a tenant without idle blocks is listed"
