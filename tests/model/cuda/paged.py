"""Random steps on paged KV memory, for tests of attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout


@dataclass
class PagedStep:
    """Memory with the KV of every sequence, and the rows of one step."""

    layout: StepLayout
    queries: Tensor
    kv: Tensor


def paged_step(
    config: ModelConfig,
    decode_contexts: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    is_captured: bool = False,
) -> PagedStep:
    """Blocks in random order; what no sequence has written is NaN. `chunks` has (start, length)."""
    generator = torch.Generator().manual_seed(seed)
    contexts = [*decode_contexts, *(start + length for start, length in chunks)]
    counts = [-(-context // block_size) for context in contexts]
    free = list(range(1, sum(counts) + 3))
    random.Random(seed).shuffle(free)
    tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int32)
    kv = torch.full((len(free) + 1, 2, block_size, config.num_kv_heads, config.head_dim), torch.nan)
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        blocks = [free.pop() for _ in range(count)]
        tables[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        entries = torch.randn(2, context, config.num_kv_heads, config.head_dim, generator=generator)
        for index, block in enumerate(blocks):
            piece = entries[:, index * block_size : (index + 1) * block_size]
            kv[block, :, : piece.shape[1]] = piece
    num_rows = len(decode_contexts) + sum(length for _, length in chunks)
    queries = torch.randn(num_rows, config.num_heads, config.head_dim, generator=generator)
    layout = StepLayout(
        decode_contexts,
        [start for start, _ in chunks],
        [length for _, length in chunks],
        tables.to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        block_size,
        is_captured,
    )
    return PagedStep(layout, queries.to(device, dtype), kv.to(device, dtype))
