"""Keys and values in memory: a contiguous buffer for each sequence, and a store of whole blocks for shared prefixes.

On a CPU, gathering scattered blocks costs more than attention itself, so each running sequence owns contiguous memory
and a prefix hit is one copy. The system commits pages only when they are first written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.kv_codec import BlockCopy, BlockLayout, copied

_CAPACITY_STEP = 64  # capacities are multiples of this many tokens
_MAX_COPIED_BYTES = 256 << 20  # out of the prefix store, on their way to where they are kept


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of one token's keys and values in all layers, in float32."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.float32.itemsize


def new_sequence_kv(config: ModelConfig, num_tokens: int) -> Tensor:
    """Memory for one sequence: [layers, keys and values, KV heads, tokens, head_dim].

    It is mapped, not taken from the heap, which would fragment and grow for as long as the server runs.
    """
    capacity = -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP
    num_bytes = capacity * kv_bytes_per_token(config)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"The system cannot map {num_bytes} bytes.") from error
    return torch.frombuffer(pages, dtype=torch.float32).view(
        config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim
    )


class PrefixStore:
    """The KV of full blocks by block id; it outlives the sequence that computed it."""

    is_on_gpu = False

    @property
    def max_copied(self) -> int:
        return max(1, _MAX_COPIED_BYTES // self.layout.num_bytes)

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._blocks = torch.empty(num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)

    def save(self, sequence_kv: Tensor, block_ids: Sequence[int], start: int, end: int) -> None:
        """Keep every block that tokens [start, end) complete."""
        for index in range(start // self._block_size, end // self._block_size):
            self._blocks[block_ids[index]].copy_(self._span(sequence_kv, index))

    def load(self, sequence_kv: Tensor, block_ids: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of a block table into a sequence's own memory."""
        for index in range(-(-num_tokens // self._block_size)):
            self._span(sequence_kv, index).copy_(self._blocks[block_ids[index]])

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(tuple(self._blocks.shape[1:]), self._blocks.dtype)

    def read(self, block_ids: Sequence[int]) -> Sequence[BlockCopy]:
        return [partial(copied, self._blocks[block_id].clone()) for block_id in block_ids]

    def write(self, block_ids: Sequence[int], blocks: Sequence[Tensor]) -> None:
        for block_id, block in zip(block_ids, blocks, strict=True):
            self._blocks[block_id].copy_(block)

    def _span(self, sequence_kv: Tensor, block_index: int) -> Tensor:
        first = block_index * self._block_size
        return sequence_kv[:, :, :, first : first + self._block_size]
