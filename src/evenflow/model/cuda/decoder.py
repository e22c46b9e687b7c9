"""The decoder of the Llama family over paged KV memory: all rows of a step at once, on one device.

Nothing here waits for the device or depends on the values of a tensor, so that a graph can capture a whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention import AttentionBackend
from evenflow.model.cuda.operations import Operations
from evenflow.model.projections import Projection, layer_projections, query_key_norms
from evenflow.model.rope import Rotation


class _Layer(NamedTuple):
    attention_norm: Tensor
    mlp_norm: Tensor
    query_key_norm: tuple[Tensor, Tensor] | None
    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection


class PagedDecoder:
    """A model's weights. `tensors` are in the type and on the device that it runs in."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        attention: AttentionBackend,
        operations: Operations,
        max_model_len: int | None = None,
    ) -> None:
        self.config, self.attention, self._operations = config, attention, operations
        self._embedding = tensors["embed_tokens.weight"]
        self._layers = [_read_layer(config, tensors, index) for index in range(config.num_layers)]
        self._norm = tensors["norm.weight"]
        self._head = self._embedding if config.tie_embeddings else tensors["lm_head.weight"]
        positions = torch.arange(max_model_len or config.max_position, dtype=torch.float32)
        rotations = Rotation(config).rotations(positions)
        self._cosines, self._sines = (
            part.contiguous().to(self._embedding.device) for part in (rotations.real, rotations.imag)
        )

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def new_kv(self, num_blocks: int, block_size: int) -> Tensor:
        """KV memory of all layers; see `attention` for the shape of one."""
        config = self.config
        shape = (config.num_layers, num_blocks, 2, block_size, config.num_kv_heads, config.head_dim)
        # Zeros: padding rows read what was never written, and a NaN there would spread.
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def kv_bytes_per_token(self) -> int:
        config = self.config
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def hidden(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, kv: Tensor, kept: Tensor | None = None
    ) -> Tensor:
        """What the head reads, for the rows in `kept` (None: all). `attention` must have been given the step's layout.

        Writes the keys and values of every row into its entry of the KV memory, `slots`.
        """
        eps, operations = self.config.rms_norm_eps, self._operations
        residual = F.embedding(token_ids, self._embedding)
        rotation = self._cosines.index_select(0, positions), self._sines.index_select(0, positions)
        update = None
        for index, layer in enumerate(self._layers):
            rows = operations.add_rms_norm(residual, update, layer.attention_norm, eps)
            queries = operations.rope_and_write_kv(
                operations.linear(rows, *layer.qkv),
                self.config.num_heads,
                kv[index],
                slots,
                rotation if self.config.layer_uses_rope[index] else None,
                layer.query_key_norm,
                eps,
            )
            attended = self.attention.run(index, queries, kv[index]).flatten(1)
            if kept is not None and index == self.config.num_layers - 1:
                # After the last attention rows no longer interact: unwanted ones are dropped there.
                residual, attended = residual.index_select(0, kept), attended.index_select(0, kept)
            rows = operations.add_rms_norm(residual, operations.linear(attended, *layer.output), layer.mlp_norm, eps)
            update = operations.linear(operations.silu_mul(operations.linear(rows, *layer.gate_up)), *layer.down)
        return operations.add_rms_norm(residual, update, self._norm, eps)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The vocabulary's scores for rows of `hidden`, in float32; written to `out` if it is given."""
        if out is None:
            # The product is summed in float32 anyway; rounding it would cost a pass and make ties.
            out = torch.empty(len(hidden), len(self._head), dtype=torch.float32, device=self.device)
        return self._operations.linear(hidden, self._head, None, out)


def _read_layer(config: ModelConfig, tensors: Mapping[str, Tensor], index: int) -> _Layer:
    return _Layer(
        tensors[f"layers.{index}.input_layernorm.weight"],
        tensors[f"layers.{index}.post_attention_layernorm.weight"],
        query_key_norms(config, tensors, index) if config.qk_norm else None,
        *layer_projections(config, tensors, index),
    )
