"""Reads and writes single blocks of paged KV memory, from the host. On a GPU, copies go through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evenflow.model.cuda.logprobs import start_copy
from evenflow.model.kv_codec import BlockLayout


class PagedBlocks:
    """The blocks of `PagedDecoder.new_kv`: [layers, blocks, ...]."""

    def __init__(self, kv: Tensor) -> None:
        self._kv = kv
        # What is written must not wait for the steps that are queued.
        self._stream = torch.cuda.Stream(kv.device) if kv.is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(tuple(self._kv[:, 0].shape), self._kv.dtype)

    def read(self, block_ids: Sequence[int]) -> Callable[[], Sequence[Tensor]]:
        """Copies of these blocks as they are after the steps launched so far; the call waits for them."""
        with torch.inference_mode():
            places = torch.tensor(block_ids).to(self._kv.device, non_blocking=True)
            copies = start_copy(self._kv.index_select(1, places).transpose(0, 1).contiguous())
        if not self._kv.is_cuda:
            return lambda: copies.unbind()
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def wait() -> Sequence[Tensor]:
            copied.synchronize()
            return copies.unbind()

        return wait

    def write(self, block_id: int, block: Tensor) -> None:
        if self._stream is None:
            self._kv[:, block_id].copy_(block)
            return
        with torch.cuda.stream(self._stream):
            self._kv[:, block_id].copy_(block.pin_memory(), non_blocking=True)
        self._stream.synchronize()
