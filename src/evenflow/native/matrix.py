"""A matrix that the native kernels multiply few rows with: its float32 weight as torch has it, or whole numbers.

Must not know: how numbers are found for a weight, when few rows are few enough.
"""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.native.build import library

_PANEL = 16  # outputs that lie side by side


class MatrixStruct(ctypes.Structure):
    """`Matrix` of linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("bits", ctypes.c_int64),
    )


class NativeMatrix:
    """rows -> rows @ weight.T + bias, for up to `most_rows`. Make one by `float_matrix` or `number_matrix`."""

    def __init__(self, shape: torch.Size, bits: int, most_rows: int, *tensors: Tensor | None) -> None:
        """tensors: weight, scales, zeros, bias."""
        self.most_rows = most_rows
        kernels = library()
        assert kernels is not None, "there are no native kernels here"
        self._run = kernels.evenflow_linear
        self._num_outputs = shape[0]
        self._tensors = tensors  # what the structure points to must live as long as it does
        addresses = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self.struct = MatrixStruct(*addresses, *shape, bits)

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


def float_matrix(weight: Tensor, bias: Tensor | None, *, most_rows: int) -> NativeMatrix:
    """Over the memory of the weight itself."""
    return NativeMatrix(weight.shape, 32, most_rows, weight.contiguous(), None, None, bias)


def number_matrix(
    numbers: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, *, num_bits: int, most_rows: int
) -> NativeMatrix:
    """weight = number * scale + zero: numbers of 4 or 8 bits, scales and zeros one a group of 32 inputs."""
    digits = numbers.to(torch.uint8)
    packed = digits if num_bits == 8 else digits[:, ::2] | digits[:, 1::2] << 4
    words = _panels(packed.contiguous().view(torch.int32))
    return NativeMatrix(numbers.shape, num_bits, most_rows, words, _panels(scales), _panels(zeros), bias)


def _panels(values: Tensor) -> Tensor:
    """[outputs, columns] -> [panel, columns, outputs of a panel], the last panel filled up with zeros."""
    padded = F.pad(values, (0, 0, 0, -len(values) % _PANEL))
    return padded.view(-1, _PANEL, values.shape[1]).transpose(1, 2).contiguous()
