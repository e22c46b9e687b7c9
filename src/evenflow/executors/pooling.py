"""Embeddings: the direction of the sum of a prompt's rows after the final norm, added chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.core.request import Pooling


def add_rows(total: Tensor | None, rows: Tensor, pooling: Pooling) -> Tensor:
    """The sum of the pooled rows so far. In float64, so that rounding it to float32 hides where the chunks ended.

    `last` may also get several rows: prompt logprobs need them all.
    """
    if pooling == "last":
        return rows[-1:].sum(0, dtype=torch.float64)
    added = rows.sum(0, dtype=torch.float64)
    return added if total is None else total + added


def unit_length(total: Tensor) -> Tensor:
    """The embedding, of unit length: of the last row, or of the sum of all rows."""
    return F.normalize(total, dim=0).float()


def to_bytes(embedding: Tensor) -> bytes:
    """Encode for a StepResult."""
    return embedding.numpy().tobytes()
