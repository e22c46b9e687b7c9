"""Matrices for the native kernels, which multiply few rows: float32 weights as torch has them, or quantised ones."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.native.build import library

_PANEL = 16  # outputs stored side by side


class MatrixStruct(ctypes.Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "scales", "zeros", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs", "bits")),
    )


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class NativeMatrix:
    """rows -> rows @ weight.T + bias, for up to `max_rows`. Made by `float_matrix` and `quantised_matrix`.

    `tensors` are weight, scales, zeros, bias.
    """

    def __init__(self, shape: torch.Size, bits: int, max_rows: int, *tensors: Tensor | None) -> None:
        self.max_rows = max_rows
        kernels = library()
        assert kernels is not None, "check library() first"
        self._run = kernels.evenflow_linear
        self._num_outputs = shape[0]
        self._tensors = tensors  # keeps alive what the structure points to
        self.struct = MatrixStruct(*map(address, tensors), *shape, bits)

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, rows.new_empty(rows.shape[0], self._num_outputs), adds=False)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return self._multiply(rows, residual.contiguous(), adds=True)

    def _multiply(self, rows: Tensor, outputs: Tensor, *, adds: bool) -> Tensor:
        rows = rows.contiguous()
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
    words = _panels(packed.contiguous().view(torch.int32))
    return NativeMatrix(codes.shape, num_bits, max_rows, words, _panels(scales), _panels(zeros), bias)


def _panels(values: Tensor) -> Tensor:
    """[outputs, columns] -> [panel, columns, outputs of a panel]; the last panel is padded with zeros."""
    padded = F.pad(values, (0, 0, 0, -len(values) % _PANEL))
    return padded.view(-1, _PANEL, values.shape[1]).transpose(1, 2).contiguous()
