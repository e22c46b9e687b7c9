"""Pinned host buffers for asynchronous copies to the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pinned(numbers: Any) -> Tensor:
    """As int32, in memory that is reused only once it has been copied; without CUDA, in any memory."""
    tensor = torch.from_numpy(np.asarray(numbers, dtype=np.int32))
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def starts_of(lengths: Sequence[int] | Any) -> Tensor:
    """Where each of these begins if they lie one after another, and where the last one ends."""
    return pinned(np.concatenate(([0], np.cumsum(lengths))))
