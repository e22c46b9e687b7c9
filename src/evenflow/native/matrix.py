"""Matrices for the native kernels, which multiply few rows: float32 weights as torch has them, or quantised ones."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.native.build import library

_PANEL = 16  # outputs stored side by side
_GROUP = 32  # inputs that share a scale


class MatrixStruct(ctypes.Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "zeros", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits")),
    )


def require(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
    """Check what a kernel gets as a bare address: it would read and write beyond the end of anything smaller."""
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"Got {name} of {list(tensor.shape)}, {tensor.dtype}, strides {tensor.stride()} on {tensor.device} but "
            f"expected {list(shape)}, {dtype}, contiguous on the CPU."
        )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeMatrix:
    """rows -> rows @ weight.T + bias, for up to `max_rows`. Made by `float_matrix` and `quantised_matrix`."""

    def __init__(
        self,
        shape: torch.Size,
        bits: int,
        max_rows: int,
        weight: Tensor,
        scales: Tensor | None,
        zeros: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self.max_rows = max_rows
        kernels = library()
        assert kernels is not None, "check library() first"
        self._run = kernels.evenflow_linear
        self.shape = num_outputs, num_inputs = shape
        panels = -(-num_outputs // _PANEL)
        if scales is None or zeros is None:
            require("weight", weight, shape)
        else:
            require("codes", weight, (panels, num_inputs * bits // 32, _PANEL), torch.int32)
            require("scales", scales, (panels, num_inputs // _GROUP, _PANEL))
            require("zeros", zeros, (panels, num_inputs // _GROUP, _PANEL))
        if bias is not None:
            require("bias", bias, (num_outputs,))
        self._tensors = weight, scales, zeros, bias  # keeps alive what the structure points to
        self.struct = MatrixStruct(*map(address, self._tensors), *shape, bits)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, rows.new_empty(rows.shape[0], self.shape[0]), adds=False)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._multiply(rows, residual.contiguous(), adds=True)

    def _multiply(self, rows: Tensor, outputs: Tensor, *, adds: bool) -> Tensor:
        rows = rows.contiguous()
        require("rows", rows, (len(rows), self.shape[1]))
        require("outputs", outputs, (len(rows), self.shape[0]))
        self._run(
            ctypes.byref(self.struct),
            ctypes.c_int64(rows.shape[0]),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(outputs.data_ptr()),
            ctypes.c_bool(adds),
        )
        return outputs


def float_matrix(weight: Tensor, bias: Tensor | None, *, max_rows: int) -> NativeMatrix:
    """Shares the weight's memory."""
    return NativeMatrix(weight.shape, 32, max_rows, weight.contiguous(), None, None, bias)


def quantised_matrix(
    codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, *, num_bits: int, max_rows: int
) -> NativeMatrix:
    """weight = code * scale + zero: unsigned codes of 4 or 8 bits, a scale and a zero per group of 32 inputs."""
    digits = codes.to(torch.uint8)
    packed = digits if num_bits == 8 else digits[:, ::2] | digits[:, 1::2] << 4
    if codes.shape[1] % _GROUP:
        raise ValueError(f"Got {codes.shape[1]} inputs but expected a multiple of {_GROUP}.")
    words = _panels(packed.contiguous().view(torch.int32))
    return NativeMatrix(codes.shape, num_bits, max_rows, words, _panels(scales), _panels(zeros), bias)


def _panels(values: Tensor) -> Tensor:
    """[outputs, columns] -> [panel, columns, outputs of a panel]; the last panel is padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -len(values) % _PANEL))
    return padded.view(-1, _PANEL, values.shape[1]).transpose(1, 2).contiguous()
