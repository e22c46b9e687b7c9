"""Which leading tokens of a request already have their KV in the pool, or will soon.

A block's hash covers its tokens and, through its parent's hash, all tokens before it; a salt in the first link isolates
tenants. The hash is collision-resistant, because a hit gives one request's KV to another.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import islice, takewhile

from evenflow.core.blocks import BlockPool
from evenflow.core.request import Request
from evenflow.core.tier import Tier

_DIGEST_BYTES = 16


def hash_blocks(
    token_ids: Sequence[int], block_size: int, salt: bytes = b"", parents: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of the full blocks of `token_ids` that follow those in `parents`."""
    parent = parents[-1] if parents else blake2b(salt, digest_size=_DIGEST_BYTES).digest()
    first = len(parents)
    num_full = len(token_ids) // block_size
    ids = array("I", token_ids[first * block_size : num_full * block_size])
    data, stride = ids.tobytes(), block_size * ids.itemsize
    hashes = []
    for offset in range(0, len(data), stride):
        parent = blake2b(parent + data[offset : offset + stride], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Finds cached prefixes, and prefixes that running requests are computing."""

    def __init__(
        self, pool: BlockPool, block_size: int, *, enabled: bool, tier: Tier | None = None, has_answers: bool = True
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._block_size = block_size
        self.enabled = enabled
        self._has_answers = has_answers  # else only blocks of prompts are published
        self._being_computed: dict[bytes, str] = {}  # hash of a prompt's block -> id of the request computing it

    def find(self, request: Request) -> list[int]:
        """Blocks that hold the request's leading tokens. At least one token is left to compute: it gives the logits."""
        return self._pool.find(self._usable_hashes(request))

    def count_published(self, request: Request) -> int:
        """How many leading tokens have their KV in the pool or the tier, even if the next step cannot use it yet."""
        return self._block_size * sum(1 for _ in takewhile(self._is_kept, self._usable_hashes(request)))

    def _is_kept(self, block_hash: bytes) -> bool:
        return self._pool.is_published(block_hash) or (self._tier is not None and self._tier.holds(block_hash))

    def first_missing(self, request: Request, num_cached_blocks: int) -> bytes | None:
        """The hash of the block after the cached ones, if others could share it."""
        return next(islice(self._usable_hashes(request), num_cached_blocks, None), None)

    def is_expected(self, block_hash: bytes) -> bool:
        """Will this block, which `find` does not return yet, be available soon (computed, restored or settled)?"""
        is_returning = self._tier is not None and self._tier.is_returning(block_hash)
        return is_returning or block_hash in self._being_computed or self._pool.is_published(block_hash)

    def stored_after(self, request: Request, num_cached_blocks: int) -> tuple[list[bytes], int]:
        """The next blocks after the cached ones that the tier holds, and the number of leading blocks with them."""
        found: list[bytes] = []
        end = num_cached_blocks
        for block_hash in islice(self._usable_hashes(request), num_cached_blocks, None):
            if self._tier is not None and self._tier.holds(block_hash) and not self.is_expected(block_hash):
                found.append(block_hash)
            elif not self.is_expected(block_hash):
                break
            end += 1
        return found, end

    def producer(self, block_hash: bytes) -> str | None:
        """The id of the request that computes this block, if one does."""
        return self._being_computed.get(block_hash)

    def _usable_hashes(self, request: Request) -> Iterator[bytes]:
        usable = self.enabled and not request.sampling.needs_every_row
        return islice(request.block_hashes, (request.num_known - 1) // self._block_size if usable else 0)

    def start_computing(self, request: Request) -> None:
        if self.enabled:
            first = request.num_cached_tokens // self._block_size
            for block_hash in islice(request.block_hashes, first, None):
                self._being_computed.setdefault(block_hash, request.id)

    def publish(self, request: Request, num_committed_before: int) -> None:
        """Publish the blocks completed since. Sampled tokens are hashed here."""
        if not self.enabled:
            return
        num_published = request.num_committed
        if not self._has_answers:
            num_published = min(num_published, request.num_prompt_tokens)
        first, end = num_committed_before // self._block_size, num_published // self._block_size
        if end > len(request.block_hashes):
            request.block_hashes += hash_blocks(request.tokens, self._block_size, request.salt, request.block_hashes)
        for index in range(first, end):
            block_hash = request.block_hashes[index]
            self._pool.publish(request.block_ids[index], block_hash, request.tenant)
            self._stop_computing(block_hash, request)

    def abandon(self, request: Request) -> None:
        """The request leaves before its whole prompt is published: no other should wait for the rest."""
        for block_hash in islice(request.block_hashes, request.num_committed // self._block_size, None):
            self._stop_computing(block_hash, request)

    def _stop_computing(self, block_hash: bytes, request: Request) -> None:
        if self._being_computed.get(block_hash) == request.id:
            del self._being_computed[block_hash]
