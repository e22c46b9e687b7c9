"""The rows in which a GPU's attention grows, for any host engine."""

from __future__ import annotations

_CUDA_TILE = 128  # rows of a chunk that one GPU processor computes together, for one head


def cuda_granules(num_processors: int, num_heads: int) -> dict[str, int]:
    """`attention_tile` and `attention_wave` of `ExecutorCaps`; the heads are those of one GPU."""
    tiles_per_head = max(1, num_processors // num_heads)
    return {"attention_tile": _CUDA_TILE, "attention_wave": tiles_per_head * _CUDA_TILE}
