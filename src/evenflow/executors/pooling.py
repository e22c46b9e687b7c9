"""Embeddings: the direction of the sum of a prompt's rows after the final norm, added chunk by chunk."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rows(total: Tensor | None, rows: Tensor) -> Tensor:
    """The sum so far with these rows. In float64, so that rounding it to float32 hides where the chunks ended."""
    added = rows.sum(0, dtype=torch.float64)
    return added if total is None else total + added


def unit_length(total: Tensor) -> Tensor:
    """The embedding: of the last row alone, or with the direction of the mean of all."""
    return F.normalize(total, dim=0).float()


def to_bytes(embedding: Tensor) -> bytes:
    """The form in which a StepResult holds it."""
    return embedding.numpy().tobytes()
