"""Reads and writes blocks of paged KV memory, from the host. On a GPU, copies go through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from evenflow.model.cuda.limits import limits_of
from evenflow.model.kv_codec import BlockCopy, BlockLayout, copied

_COPIED_SHARE = 32  # of the memory beside the KV cache, for copies: one part in this many


class PagedBlocks:
    """The blocks of `PagedDecoder.new_kv`: [layers, blocks, ...]."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        self.is_on_gpu = kv.is_cuda
        # Copies must not wait for queued steps, nor queued steps for copies.
        self._streams = [torch.cuda.Stream(kv.device) for _ in range(2)] if kv.is_cuda else []  # type: ignore[no-untyped-call]

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(tuple(self._kv[:, 0].shape), self._kv.dtype)

    @property
    def max_copied(self) -> int:
        """Maximum blocks per copy; one step can evict a gigabyte."""
        num_bytes = limits_of(self._kv.device).memory // _COPIED_SHARE
        return max(1, num_bytes // self.layout.num_bytes)

    def read(self, block_ids: Sequence[int]) -> Sequence[BlockCopy]:
        """On a GPU, copied on the device first, after the steps launched so far."""
        with torch.inference_mode():
            places = torch.tensor(block_ids).to(self._kv.device, non_blocking=True)
            copies = self._new_blocks(len(block_ids))
            for number, layer in enumerate(self._kv):  # layer by layer: all at once would double the memory
                copies[:, number] = layer.index_select(0, places)
            blocks = copies.unbind()
        if not self._kv.is_cuda:
            return [partial(copied, block) for block in blocks]
        is_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_copied.record()
        return [partial(self._fetch, is_copied, block) for block in blocks]

    def _new_blocks(self, count: int) -> Tensor:
        """Contiguous blocks on the KV memory's device."""
        return self._kv.new_empty((count, *self.layout.shape))

    def _fetch(self, is_copied: torch.cuda.Event, block: Tensor, into: Tensor | None) -> Tensor:
        stream = self._streams[0]
        target = torch.empty(block.shape, dtype=block.dtype, pin_memory=True) if into is None else into
        with torch.cuda.stream(stream):
            stream.wait_event(is_copied)
            target.copy_(block, non_blocking=True)
        stream.synchronize()
        return target

    def write(self, block_ids: Sequence[int], blocks: Sequence[Tensor]) -> None:
        """On a GPU, copied to the device one by one, then into all layers together."""
        if not self._kv.is_cuda:
            for block_id, block in zip(block_ids, blocks, strict=True):
                self._kv[:, block_id].copy_(block)
            return
        stream = self._streams[1]
        with torch.cuda.stream(stream):
            arrived = self._new_blocks(len(blocks))
            for place, block in zip(arrived, blocks, strict=True):
                place.copy_(block if block.is_pinned() else block.pin_memory(), non_blocking=True)
            places = torch.tensor(block_ids).to(self._kv.device, non_blocking=True)
            self._kv.index_copy_(1, places, arrived.transpose(0, 1))
        stream.synchronize()
