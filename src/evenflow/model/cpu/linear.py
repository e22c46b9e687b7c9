"""Linear layers in float32, in the form that runs fastest on this machine for each number of rows.

`benchmarks/cpu_ops.py` measures the choices made here.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.native.build import library
from evenflow.native.matrix import NativeMatrix, float_matrix

_NATIVE_ROWS = 32  # up to here the native kernel beats torch, 1.1-1.6x: it reads a weight once for all rows
ANY_ROWS = sys.maxsize
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_PACKED_ROWS = range(2, 32)  # where oneDNN's packed weights win: 1.2-1.5x on x86, 1.8x on ARM
_MIN_PACKED = 500_000  # weights in a layer; for smaller ones a packed call's 25 microseconds outweigh the gain


class Linear:
    """rows -> rows @ weight.T + bias. `native` is the same product for few rows, if there are native kernels."""

    native: NativeMatrix | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The residual plus this layer's output; may overwrite the residual."""
        return residual.add_(self(rows))


class FloatLinear(Linear):
    """The file's own weight, for the native kernel and for many rows.

    Without the kernel, the weight is input-major on x86, and if `packs` there is a second copy packed by oneDNN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packs: bool = False) -> None:
        self._bias = bias
        self.native = float_matrix(weight, bias, max_rows=_NATIVE_ROWS) if library() else None
        # On x86 one row reads an input-major weight 1.2x as fast; many rows make no difference.
        self._weight = weight if self.native or not _IS_X86 else weight.t().contiguous().t()
        packs = packs and not self.native and weight.numel() >= _MIN_PACKED
        self._packed = pack(weight) if packs else None

    def __call__(self, rows: Tensor) -> Tensor:
        if self.native is not None and len(rows) <= self.native.max_rows:
            return self.native(rows)
        if self._packed is not None and len(rows) in _PACKED_ROWS:
            return packed_linear(rows, self._packed, self._bias)
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self.native is not None and len(rows) <= self.native.max_rows:
            return self.native.add_to(residual, rows)
        if self._packed is not None and len(rows) in _PACKED_ROWS:
            return packed_linear(rows, self._packed, self._bias).add_(residual)
        if self._bias is not None:
            residual.add_(self._bias)
        return residual.addmm_(rows, self._weight.t())


class NativeLinear(Linear):
    """The native kernel for any number of rows. Each output is summed in the same order, whatever their number."""

    native: NativeMatrix

    def __init__(self, native: NativeMatrix) -> None:
        self.native = native

    def __call__(self, rows: Tensor) -> Tensor:
        return self.native(rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self.native.add_to(residual, rows)


def fixed_order_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    return NativeLinear(float_matrix(weight, bias, max_rows=ANY_ROWS))


def pack(weight: Tensor) -> Tensor:
    """A weight in oneDNN's own layout, for `packed_linear` only."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packed_linear(rows: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, packed, bias, "none", [], "")
    return result


@functools.cache
def can_pack(dtype: torch.dtype = torch.float32) -> bool:
    """Whether this build of torch can pack weights."""
    return computes_products(lambda rows, weight: packed_linear(rows, pack(weight)), dtype, tolerance=0.02)


def computes_products(multiply: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, tolerance: float) -> bool:
    """Whether `multiply`, which calls private operations of torch, runs in this build and gives rows @ weight.T."""
    weight = torch.linspace(-1, 1, 32 * 32).view(32, 32).to(dtype)
    rows = torch.linspace(1, -1, 4 * 32).view(4, 32).to(dtype)
    try:
        return torch.allclose(multiply(rows, weight), F.linear(rows, weight), rtol=tolerance, atol=tolerance)
    except (AttributeError, RuntimeError):
        return False
