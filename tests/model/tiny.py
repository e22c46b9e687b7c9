"""Small models with random weights, for tests of everything that runs one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig, RopeConfig
from evenflow.model.formats.weights import needed_shapes


def tiny_config(**changes: Any) -> ModelConfig:
    """Four layers, six heads over two KV heads of 16, a vocabulary of 128."""
    defaults: dict[str, Any] = {
        "architecture": "tiny",
        "vocab_size": 128,
        "hidden_size": 72,
        "intermediate_size": 96,
        "num_layers": 4,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position": 512,
        "rms_norm_eps": 1e-5,
        "attention_scale": 16**-0.5,
        "rope": RopeConfig(theta=10000.0, rotary_dim=16, scaling=None),
        "layer_windows": (None,) * 4,
        "layer_uses_rope": (True,) * 4,
        "tie_embeddings": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**{**defaults, **changes})


def random_tensors(config: ModelConfig, seed: int = 0, gain: float = 1.0) -> dict[str, Tensor]:
    """Weights large enough for attention to prefer some tokens and for logits to have clear winners.

    A smaller `gain` of the layers keeps them from amplifying what rounding does.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in needed_shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            tensors[name] = 1 + 0.1 * values
        elif name.endswith("bias"):
            tensors[name] = 0.5 * values
        else:
            tensors[name] = values * (gain if "proj" in name else 1.0) * 2.0 / shape[-1] ** 0.5
    return tensors
