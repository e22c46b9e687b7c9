"""Linear layers in float32, in the form that runs fastest here for each number of rows.

Knows matrices; knows nothing of the model they belong to. `benchmarks/cpu_ops.py` measures what is chosen here.
"""

from __future__ import annotations

import functools
import platform
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_PACKED_ROWS = range(2, 32)  # where oneDNN's packed weights win: 1.2-1.5x on x86, 1.8x on ARM
_LEAST_PACKED = 500_000  # weights in a layer; below, the 25 microseconds that a packed call costs eat the gain


class Linear(Protocol):
    """rows -> rows @ weight.T + bias."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The residual plus this layer's output; the residual's own memory may be used for it."""
        ...


class FloatLinear:
    """The weight as it is for one row and for many; between, packed by oneDNN where a second copy is afforded."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packs: bool = False) -> None:
        # One row against a weight stored input by input reads memory 1.2x as fast on x86; many rows run alike.
        self._weight = weight.t().contiguous().t() if _IS_X86 else weight
        self._bias = bias
        self._packed = pack(weight) if packs and weight.numel() >= _LEAST_PACKED else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is not None and rows.shape[0] in _PACKED_ROWS:
            return packed_linear(rows, self._packed, self._bias)
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._packed is not None and rows.shape[0] in _PACKED_ROWS:
            return packed_linear(rows, self._packed, self._bias).add_(residual)
        if self._bias is not None:
            residual.add_(self._bias)
        return residual.addmm_(rows, self._weight.t())


def pack(weight: Tensor) -> Tensor:
    """A weight in oneDNN's own layout; only `packed_linear` can read it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return result


@functools.cache
def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch packs weights: the ops are not part of its public interface."""
    weight = torch.linspace(-1, 1, 32 * 32).view(32, 32).to(dtype)
    rows = torch.linspace(1, -1, 4 * 32).view(4, 32).to(dtype)
    try:
        return torch.allclose(packed_linear(rows, pack(weight)), F.linear(rows, weight), rtol=0.02, atol=0.02)
    except (AttributeError, RuntimeError):
        return False
