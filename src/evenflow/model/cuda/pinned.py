"""Pinned host buffers for asynchronous copies to the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def pinned(numbers: Any) -> Tensor:
    """Values as int32 in pinned memory, reused only after the copy; without CUDA in ordinary memory."""
    tensor = torch.from_numpy(np.asarray(numbers, dtype=np.int32))
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def starts_of(lengths: Sequence[int] | Any) -> Tensor:
    """Offsets of these lengths laid end to end, and the total."""
    return pinned(np.concatenate(([0], np.cumsum(lengths))))
