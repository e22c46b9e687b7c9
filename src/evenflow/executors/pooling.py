"""Embeddings: the direction of the sum of a prompt's rows after the final norm, added chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.core.request import Pooling


def add_rows(total: Tensor | None, rows: Tensor, pooling: Pooling) -> Tensor:
    """The sum of the pooled rows so far. In float64, so that rounding it to float32 hides where the chunks ended.

    More rows than one may be at hand for `last` too: prompt logprobs want them all.
    """
    if pooling == "last":
        return rows[-1:].sum(0, dtype=torch.float64)
    added = rows.sum(0, dtype=torch.float64)
    return added if total is None else total + added


def unit_length(total: Tensor) -> Tensor:
    """The embedding: of the last row alone, or with the direction of the mean of all."""
    return F.normalize(total, dim=0).float()


def to_bytes(embedding: Tensor) -> bytes:
    """The form in which a StepResult holds it."""
    return embedding.numpy().tobytes()
