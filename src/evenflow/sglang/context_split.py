"""How FlashInfer cuts the contexts of a batch that mixes chunks and decodes.

By itself it cuts none if there are more sequences than the GPU has room for, so that a batch takes as long as one block
of threads needs for the longest context: 0.5 ms for every 1,000 tokens of it in an 8B model on an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

WORKSPACE_VARIABLE = "SGLANG_FLASHINFER_WORKSPACE_SIZE"
WORKSPACE_BYTES = 1 << 30  # SGLang's own 384 MiB hold the parts of short chunks alone
_LENGTH = 4096  # positions of a part, if its results fit the workspace
_MOST_TILE_ROWS = 128
_USED_SHARE = 0.9  # of the workspace


class ContextSplit(NamedTuple):
    """Of one SGLang process. Partial results are float32, for whole tiles of (token, query head of a KV head)."""

    backend: Any
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def apply(self, length: int | None) -> None:
        """For the batches that are planned from now on; None: as FlashInfer likes."""
        self.backend.prefill_split_tile_size = length

    def length_for(self, decode_contexts: Sequence[int], chunks: Sequence[tuple[int, int]]) -> int | None:
        """For these decodes, and chunks with their starts and lengths."""
        longest = max([*decode_contexts, *(start for start, _ in chunks)], default=0)
        num_bytes = self.backend.workspace_buffer.numel()
        most_rows = _USED_SHARE * num_bytes / (self.num_heads * self.head_dim * 4)
        group = self.num_heads // self.num_kv_heads
        tiles = [_MOST_TILE_ROWS] * len(decode_contexts) + [length * group + _MOST_TILE_ROWS for _, length in chunks]
        contexts = [*decode_contexts, *(start + length for start, length in chunks)]
        part = _LENGTH
        while part < longest:
            if sum(rows * -(-context // part) for rows, context in zip(tiles, contexts, strict=True)) <= most_rows:
                return part
            part *= 2
        return None


def context_split(scheduler: Any) -> ContextSplit | None:
    """None: its attention is another."""
    backend = scheduler.tp_worker.model_runner.attn_backend
    if not hasattr(backend, "prefill_split_tile_size") or backend.prefill_split_tile_size is not None:
        return None
    model, num_ranks = scheduler.model_config, scheduler.ps.tp_size
    return ContextSplit(
        backend, model.num_attention_heads // num_ranks, model.get_num_kv_heads(num_ranks), model.head_dim
    )
