"""Keys and values in memory: a contiguous buffer for each sequence, and a store of whole blocks to share prefixes from.

On a CPU, gathering scattered blocks costs more than attention itself, so each running sequence owns contiguous memory
and a prefix hit is one copy. Pages of either are committed by the system only when they are first written.
Must not know: requests, plans, how attention reads what lies here.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig

_CAPACITY_STEP = 64  # tokens that capacities are rounded up to


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes that one token's keys and values take in all layers, in float32."""
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * torch.float32.itemsize


def new_sequence_kv(config: ModelConfig, num_tokens: int) -> Tensor:
    """Room for one sequence: [layers, keys and values, KV heads, tokens, head_dim].

    It comes from the system and goes back to it with the sequence. From the process's heap, where sizes of every kind
    come and go, a server's memory would grow for as long as it runs.
    """
    capacity = -(-num_tokens // _CAPACITY_STEP) * _CAPACITY_STEP
    num_bytes = capacity * kv_bytes_per_token(config)
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"The system gives no {num_bytes} bytes.") from error
    return torch.frombuffer(pages, dtype=torch.float32).view(
        config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim
    )


class PrefixStore:
    """The KV of full blocks by block id, kept when the sequence that computed it is gone."""

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

    def _span(self, sequence_kv: Tensor, block_index: int) -> Tensor:
        first = block_index * self._block_size
        return sequence_kv[:, :, :, first : first + self._block_size]
