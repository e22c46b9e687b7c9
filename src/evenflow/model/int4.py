"""Linear layers with 4-bit weights (8-bit for the output head), by what runs fast on this machine.

Knows matrices; knows nothing of the model they belong to. `benchmarks/int4_perplexity.py` measures what it costs in
quality, `benchmarks/cpu_ops.py` in time.

Weights are quantised in groups of 32 inputs, each with a scale and a zero; what a Q4_0 or Q4_1 file holds comes out as
it was, and what a Q8_0 head holds too. Few rows are bound by memory and read these numbers; many are bound by
arithmetic and run on the same values in whatever form this CPU multiplies fastest.
The output head loses most by 4 bits and is a fifth of a small model: it takes 8.
"""

from __future__ import annotations

import functools
import logging
import math
import platform

import torch
from torch import Tensor

from evenflow.model.linear import FloatLinear, Linear, can_pack, pack, packed_linear
from evenflow.native.build import library
from evenflow.native.matrix import NativeMatrix, number_matrix

_log = logging.getLogger(__name__)

GROUP = 32  # inputs that share a scale
# Rows up to which reading 4-bit weights wins:
_NATIVE_ROWS = 8  # unpacked in registers, against bfloat16 on matrix units, which are 1.2x as fast at 16 rows
_NATIVE_ROWS_ON_ARM = 2  # against 8-bit activations, by count of instructions
_TORCH_ROWS = 4  # by torch's 4-bit product, against bfloat16


def int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The best 4-bit form of a layer here, or its float32 form where there is none."""
    outputs, inputs = weight.shape
    if inputs % GROUP == 0 and outputs % GROUP == 0 and (form := _layer_form(weight, bias)):
        return form
    _say_float32(outputs, inputs)
    return FloatLinear(weight, bias)


def _layer_form(weight: Tensor, bias: Tensor | None) -> Linear | None:
    """None where this machine has nothing for 4 bits."""
    if library():
        return NativeInt4Linear(weight, bias)
    if _has_arm_kernels():
        return DynamicInt4Linear(weight, bias)
    return WeightOnlyInt4Linear(weight, bias) if _has_x86_kernels() else None


@functools.cache
def _say_float32(outputs: int, inputs: int) -> None:
    """Once a shape, not once a layer."""
    _log.warning("weights=int4: no fast 4-bit kernel here for a layer of %d x %d; it runs in float32.", outputs, inputs)


def int4_head(weight: Tensor, bias: Tensor | None) -> Linear:
    """The output head beside 4-bit layers: in 8 bits where that is fast, else in float32."""
    if library() and weight.shape[1] % GROUP == 0:
        return NativeInt8Linear(weight, bias)
    if _has_x86_kernels() and _has_int8_kernels():
        return DynamicInt8Linear(weight, bias)
    return FloatLinear(weight, bias, packs=can_pack())


class SplitLinear:
    """A native form of a weight for few rows, another form for many."""

    def __init__(self, native: NativeMatrix, many: Linear) -> None:
        self.native = native
        self._many = many

    def __call__(self, rows: Tensor) -> Tensor:
        return self.native(rows) if len(rows) <= self.native.most_rows else self._many(rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        form = self.native if len(rows) <= self.native.most_rows else self._many
        return form.add_to(residual, rows)


class NativeInt4Linear(SplitLinear):
    """4-bit weights by float32 activations for few rows, the same weights as this CPU likes them for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        numbers, scales, zeros = quantise(weight)
        many: Linear
        if _has_arm_kernels():
            most_rows, many = _NATIVE_ROWS_ON_ARM, DynamicInt4Linear(weight, bias)
        else:
            most_rows, many = _NATIVE_ROWS, _spelled_out(dequantise(numbers, scales, zeros), bias)
        lowest = zeros - 8 * scales
        super().__init__(
            number_matrix(numbers + 8, scales, lowest, bias, num_bits=4, most_rows=most_rows),
            many,
        )


class NativeInt8Linear(SplitLinear):
    """8-bit weights by float32 activations for few rows, a scale a group, as Q8_0 files have it; float32 for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        groups = weight.view(len(weight), -1, GROUP)
        scales = _no_zeros((groups.abs().amax(-1) / 127).half().float())
        numbers = (groups / scales.unsqueeze(-1)).round_().clamp_(-128, 127).add_(128).view(weight.shape)
        super().__init__(
            number_matrix(numbers, scales, -128 * scales, bias, num_bits=8, most_rows=_NATIVE_ROWS),
            FloatLinear(weight, bias),
        )


class TorchLinear:
    """What has no native form."""

    native = None

    def __call__(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.add_(self(rows))


def _has_arm_kernels() -> bool:
    backend = getattr(torch.backends, "kleidiai", None)
    return backend is not None and bool(backend.is_available())


def _has_x86_kernels() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _has_fast_bfloat16() -> bool:
    """Whether 16-bit products are faster than float32 ones, not just possible."""
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return is_supported is not None and is_supported() and can_pack(torch.bfloat16)


@functools.cache
def _has_int8_kernels() -> bool:
    """Whether oneDNN's 8-bit product is in this build and right: it is not part of torch's public interface."""
    is_supported = getattr(torch.cpu, "_is_vnni_supported", None)
    if is_supported is None or not is_supported():
        return False
    weight = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    rows = torch.linspace(1, -1, 4 * 32).view(4, 32)
    try:
        return torch.allclose(DynamicInt8Linear(weight, None)(rows), rows @ weight.t(), rtol=0.05, atol=0.05)
    except (AttributeError, RuntimeError):
        return False


class DynamicInt8Linear(TorchLinear):
    """8-bit weights, one scale an output, by activations quantised row by row: rows do not affect each other."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._scales = weight.abs().amax(1).clamp_(min=1e-12).div_(127)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        numbers = (weight / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(numbers, None)

    def __call__(self, rows: Tensor) -> Tensor:
        peaks = torch.linalg.vector_norm(rows, math.inf, -1, True).clamp_(min=1e-30)
        numbers = (rows * (127 / peaks)).round_().to(torch.int8)
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            numbers, 1 / 127, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        product.mul_(peaks)
        return product if self._bias is None else product.add_(self._bias)


class DynamicInt4Linear(TorchLinear):
    """4-bit weights by activations quantised row by row to 8 bits: `_dyn_quant_matmul_4bit`, made for ARM.

    The kernel knows scales and no zeros, so these are a second, small product: each group's zero by the sum of its
    inputs. Without them, what a Q4_1 file holds would be rounded once more, at a fourth more perplexity.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        numbers, scales, zeros = quantise(weight, torch.bfloat16)
        nibbles = (numbers + 8).to(torch.uint8)
        self._packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
            nibbles[:, 1::2] << 4 | nibbles[:, ::2], scales.bfloat16(), bias, GROUP, self._inputs, self._outputs
        )
        self._zeros = zeros.t().contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit.default(
            rows, self._packed, GROUP, self._inputs, self._outputs
        )
        return product.addmm_(rows.view(rows.shape[0], -1, GROUP).sum(-1), self._zeros)


class Bfloat16Linear(TorchLinear):
    """Weights and activations in 16 bits, products summed in 32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = pack(weight.bfloat16())
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product = packed_linear(rows.bfloat16(), self._packed).float()
        return product if self._bias is None else product.add_(self._bias)


def _spelled_out(weight: Tensor, bias: Tensor | None) -> Linear:
    """For many rows, where the numbers are no longer what a product waits for."""
    return Bfloat16Linear(weight, bias) if _has_fast_bfloat16() else FloatLinear(weight, bias)


class WeightOnlyInt4Linear(TorchLinear):
    """Torch's 4-bit weights by bfloat16 activations for a few rows, the same weights in 16 or 32 bits for more."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        numbers, scales, zeros = quantise(weight, torch.bfloat16)
        self._bias = bias
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int() + 8, 1)
        self._scales_zeros = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous().bfloat16()
        self._many = _spelled_out(dequantise(numbers, scales, zeros), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) > _TORCH_ROWS:
            return self._many(rows)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            rows.bfloat16(), self._packed, GROUP, self._scales_zeros
        ).float()
        return product if self._bias is None else product.add_(self._bias)


def quantise(weight: Tensor, kept: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers in [-8, 7], a scale and a zero a group: weight = number x scale + zero.

    Two ways, of which each group takes the one that fits it better: lowest and highest become -8 and 7, as in Q4_1
    files; or zero is 0 and the value farthest from it -8, as in Q4_0 files. So weights of either come out as they were.
    Scales (and zeros, if the kernels hold them in bfloat16) are rounded to what is `kept` first.
    """
    groups = weight.view(len(weight), -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = _no_zeros(((highest - lowest) / 15).to(kept).float())
    zeros = lowest + 8 * scales
    if kept == torch.bfloat16:
        zeros = zeros.bfloat16().float()
    numbers, errors = _numbers(groups, scales, zeros)
    if errors.any():
        farthest = torch.where(highest > -lowest, highest, lowest)
        other_scales, other_zeros = _no_zeros((farthest / -8).to(kept).float()), torch.zeros_like(zeros)
        other_numbers, other_errors = _numbers(groups, other_scales, other_zeros)
        is_better = other_errors < errors
        numbers = torch.where(is_better, other_numbers, numbers)
        scales, zeros = torch.where(is_better, other_scales, scales), torch.where(is_better, other_zeros, zeros)
    return numbers.to(torch.int8).view(weight.shape), scales.squeeze(-1), zeros.squeeze(-1)


def _numbers(groups: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest numbers, and by how much each group's weight is missed, squared and summed."""
    numbers = (groups - zeros).div_(scales).round_().clamp_(-8, 7)
    errors = (numbers * scales).add_(zeros).sub_(groups).square_().sum(-1, keepdim=True)
    return numbers, errors


def _no_zeros(scales: Tensor) -> Tensor:
    """Scales of groups of equal weights, of which any will do, made fit to divide by."""
    return scales.masked_fill_(scales == 0, 1.0)


def dequantise(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight that these numbers stand for."""
    groups = numbers.view(len(numbers), -1, GROUP) * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    return groups.view(numbers.shape)
