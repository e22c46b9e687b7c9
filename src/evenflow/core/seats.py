"""Running requests: the slot and blocks of each, and the changes to them that an executor must be told.

Knows nothing about lines, classes and policies: `room` says who comes in and who gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import chain

from evenflow.core.blocks import BlockPool
from evenflow.core.holdings import Holdings
from evenflow.core.plan import Admission, BlockTableChange, Chunk, Decodes
from evenflow.core.policy import Quota
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.request import Request, Status


class Seats:
    """Slots and blocks, and the requests that have them."""

    def __init__(
        self,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        block_size: int,
        max_num_seqs: int,
        price_of: Callable[[int, int], float],  # seconds of a chunk of this start and length
    ) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._price_of = price_of
        self.prefilling: dict[str, Request] = {}  # in order of admission, but for those that `take_back` returns
        self.decoding: dict[str, Request] = {}  # with exactly one token to feed
        self.newest_step: int | None = None  # of those in flight, which may touch blocks that are released
        self._decode_columns: Decodes | None = None  # of all of `decoding`, until that changes
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []  # for the next plan
        self._table_changes: list[BlockTableChange] = []  # not sent yet

    def __len__(self) -> int:
        return len(self.prefilling) + len(self.decoding)

    def __iter__(self) -> Iterator[Request]:
        return chain(self.prefilling.values(), self.decoding.values())

    def get(self, request_id: str) -> Request | None:
        return self.prefilling.get(request_id) or self.decoding.get(request_id)

    @property
    def num_free(self) -> int:
        """Free slots."""
        return len(self._free_slots)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def holdings(self) -> Holdings:
        return Holdings(self, self._max_num_seqs, self._pool.num_blocks, self._block_size)

    # ---- coming in and leaving ----

    def admit(self, request: Request) -> Admission:
        """Give a waiting request a slot and blocks for all its known tokens."""
        cached = self._prefix_cache.find(request)
        self._pool.hold(cached)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.num_cached_tokens = request.place.num_cached_tokens = len(cached) * self._block_size
        request.num_scheduled = request.num_committed = request.num_cached_tokens
        self.append_blocks(request, self.num_blocks(request.num_known) - len(cached), cached)
        self.prefilling[request.id] = request
        self._prefix_cache.start_computing(request)
        return Admission(
            request_id=request.id,
            epoch=request.epoch,
            slot=request.slot,
            token_ids=tuple(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            max_known_tokens=request.max_known_tokens,
            sampling=request.sampling,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
        )

    def append_blocks(self, request: Request, count: int, cached: Sequence[int] = ()) -> None:
        """Append the cached blocks and `count` new ones to its table."""
        blocks = [*cached, *self._pool.allocate(count)]
        self._table_changes.append(BlockTableChange(request.slot, len(request.block_ids), tuple(blocks)))
        request.block_ids += blocks

    def leave(self, request: Request) -> None:
        """Release its slot and its blocks."""
        self._prefix_cache.abandon(request)
        request.epoch += 1
        self._pool.release(request.block_ids, self.newest_step, self._block_cost(request))
        request.block_ids = []
        self._free_slots.append(request.slot)
        self._released_slots.append(request.slot)
        if self._table_changes:
            self._table_changes = [change for change in self._table_changes if change.slot != request.slot]
        request.slot = -1
        self.prefilling.pop(request.id, None)
        self.decoding.pop(request.id, None)
        self._decode_columns = None

    def _block_cost(self, request: Request) -> float:
        """Seconds that each of its blocks saves who needs them again. Long prefixes save more: attention grows."""
        num_tokens = request.num_committed
        if not self._prefix_cache.enabled or num_tokens < self._block_size:
            return 0.0
        return self._price_of(0, num_tokens) * self._block_size / num_tokens

    # ---- parts of a plan ----

    def take_decodes(self, decodes: Sequence[Request], positions: Sequence[int]) -> Decodes:
        for request in decodes:
            request.num_scheduled += 1
        all_decode = len(decodes) == len(self.decoding)
        columns = self._decode_columns if all_decode else None
        if columns is None:
            columns = Decodes(
                request_ids=tuple([r.id for r in decodes]),
                epochs=tuple([r.epoch for r in decodes]),
                slots=tuple([r.slot for r in decodes]),
            )
        self._decode_columns = columns if all_decode else None
        return replace(columns, positions=tuple(positions))

    def take_chunk(self, request: Request, quota: Quota) -> Chunk:
        start = request.num_scheduled
        request.num_scheduled = end = start + quota.tokens
        samples = end == request.num_known
        if samples:
            del self.prefilling[request.id]
            self.decoding[request.id] = request
            self._decode_columns = None
        return Chunk(
            request_id=request.id,
            epoch=request.epoch,
            slot=request.slot,
            start=start,
            length=quota.tokens,
            reason=quota.reason,
            samples=samples,
            prompt_logprobs=request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0,
        )

    def take_back(self, request: Request, chunk: Chunk, length: int) -> None:
        """The step computed only this many rows of the chunk: schedule the others again."""
        request.num_scheduled = chunk.start + length
        if chunk.samples:
            del self.decoding[request.id]
            self.prefilling[request.id] = request
            self._decode_columns = None

    def take_released_slots(self) -> tuple[int, ...]:
        released, self._released_slots = tuple(self._released_slots), []
        return released

    def take_table_changes(self, slots: Set[int] | None) -> tuple[BlockTableChange, ...]:
        """The changes of these slots' tables; None: all. A step that fails may not apply them, so it gets no others."""
        changes = self._table_changes
        self._table_changes = [] if slots is None else [change for change in changes if change.slot not in slots]
        return tuple(changes if slots is None else [change for change in changes if change.slot in slots])
