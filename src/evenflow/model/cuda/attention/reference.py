"""Attention over paged KV memory in plain torch, on any device: the reference in tests of the kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.core.plan import AttentionWaves
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout


class ReferenceAttention:
    """Implements `AttentionBackend`, one sequence after another, in float32."""

    name = "reference"
    waves: AttentionWaves | None = None

    def __init__(self, config: ModelConfig) -> None:
        self._scale, self._windows = config.attention_scale, config.layer_windows
        self._group = config.num_heads // config.num_kv_heads
        self._spans: list[tuple[int, int]] = []

    def plan(self, layout: StepLayout) -> None:
        self._tables = layout.block_tables
        self._spans = [(context - 1, 1) for context in layout.decode_contexts]
        self._spans += zip(layout.chunk_starts, layout.chunk_lengths, strict=True)

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        attended = torch.empty_like(queries) if out is None else out
        row = 0
        for table, (start, length) in zip(self._tables, self._spans, strict=False):
            rows = slice(row, row + length)
            attended[rows] = self._attend(queries[rows], kv, table, start, self._windows[layer])
            row += length
        return attended

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> None:
        """Not supported."""

    def _attend(self, queries: Tensor, kv: Tensor, table: Tensor, start: int, window: int | None) -> Tensor:
        end = start + len(queries)
        num_blocks = -(-end // kv.shape[2])
        # [keys and values, heads, positions, head dim]
        seen = kv[table[:num_blocks]].float().permute(1, 3, 0, 2, 4).flatten(2, 3)[:, :, :end]
        keys, values = seen.repeat_interleave(self._group, dim=1)
        positions = torch.arange(end, device=queries.device)
        distance = positions[start:, None] - positions
        visible = distance >= 0
        if window is not None:
            visible &= distance < window
        rows = queries.float().transpose(0, 1)
        attended = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=self._scale)
        return attended.transpose(0, 1).to(queries.dtype)
