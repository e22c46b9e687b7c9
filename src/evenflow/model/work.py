"""What one step of a model reads and multiplies, for a roofline."""

from __future__ import annotations

import math

from evenflow.core.roofline import ModelWork
from evenflow.model.config import ModelConfig
from evenflow.model.weights import needed_shapes


def model_work(config: ModelConfig, itemsize: int) -> ModelWork:
    """With weights and KV of `itemsize` bytes a number."""
    # A row of the embedding is looked up, not multiplied; tied, it is the head.
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    num_weights = sum(math.prod(shape) for shape in needed_shapes(config).values()) - looked_up
    return ModelWork(
        num_layers=config.num_layers,
        num_weights=num_weights,
        weight_bytes=float(num_weights * itemsize),
        attention_width=config.num_heads * config.head_dim,
        cache_bytes=float(2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize),
    )
