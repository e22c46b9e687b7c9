"""Arranges a layer's weights for decoders: projections of the same rows as one matrix, rotary pairs side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.rope import interleave

Projection = tuple[Tensor, Tensor | None]  # weight and bias


def layer_projections(config: ModelConfig, tensors: Mapping[str, Tensor], layer: int) -> Iterator[Projection]:
    """Queries, keys and values; output; gate and up; down. Each is read when it is asked for."""
    yield _fused(config, tensors, layer, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), config.qkv_bias)
    yield _fused(config, tensors, layer, ("self_attn.o_proj",), config.output_bias)
    yield _fused(config, tensors, layer, ("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias)
    yield _fused(config, tensors, layer, ("mlp.down_proj",), config.mlp_bias)


def query_key_norms(config: ModelConfig, tensors: Mapping[str, Tensor], layer: int) -> tuple[Tensor, Tensor]:
    """The weights of a query head's norm and of a key head's, [head_dim]."""
    query, key = (
        interleave(tensors[f"layers.{layer}.self_attn.{name}.weight"].unsqueeze(0), config.rope.rotary_dim)[0]
        for name in ("q_norm", "k_norm")
    )
    return query, key


def _fused(
    config: ModelConfig, tensors: Mapping[str, Tensor], layer: int, names: tuple[str, ...], has_bias: bool
) -> Projection:
    def part(name: str, kind: str) -> Tensor:
        tensor = tensors[f"layers.{layer}.{name}.{kind}"]
        if not name.endswith(("q_proj", "k_proj")):
            return tensor
        per_head = tensor.view(-1, config.head_dim, *tensor.shape[1:])
        return interleave(per_head, config.rope.rotary_dim).reshape(tensor.shape)

    def fused(kind: str) -> Tensor:
        parts = [part(name, kind) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return fused("weight"), fused("bias") if has_bias else None
