"""Linear layers with 4-bit weights (8-bit for the output head), in the form that runs fastest on this machine.

Weights are quantised in groups of 32 inputs, each with a scale and a zero; those of Q4_0, Q4_1 and Q8_0 files come out
unchanged. Few rows are bound by memory and read the codes (the quantised integers). Many rows are bound by arithmetic
and run on the same values in the form that this CPU multiplies fastest. The output head loses most by 4 bits and is a
fifth of a small model, so it takes 8. `benchmarks/int4_perplexity.py` measures the quality, `benchmarks/cpu_ops.py`
the speed.
"""

from __future__ import annotations

import functools
import logging
import math
import platform

import torch
from torch import Tensor

from evenflow.model.cpu.linear import (
    ANY_ROWS,
    FloatLinear,
    Linear,
    NativeLinear,
    can_pack,
    computes_products,
    fixed_order_linear,
    pack,
    packed_linear,
)
from evenflow.native.build import library
from evenflow.native.matrix import NativeMatrix, quantised_matrix

_log = logging.getLogger(__name__)

GROUP = 32  # inputs that share a scale
# Rows up to which reading 4-bit weights wins:
_NATIVE_ROWS = 8  # unpacked in registers, against bfloat16 on matrix units, which are 1.2x as fast at 16 rows
_NATIVE_ROWS_ON_ARM = 2  # against 8-bit activations, by count of instructions
_TORCH_ROWS = 4  # by torch's 4-bit product, against bfloat16


def int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The fastest 4-bit form of a layer on this machine, or its float32 form if there is none."""
    outputs, inputs = weight.shape
    if inputs % GROUP == 0 and outputs % GROUP == 0:
        if library():
            return NativeInt4Linear(weight, bias)
        if _has_arm_kernels():
            return DynamicInt4Linear(weight, bias)
        if _has_x86_kernels():
            return WeightOnlyInt4Linear(weight, bias)
    _warn_float32(outputs, inputs)
    return FloatLinear(weight, bias)


@functools.cache
def _warn_float32(outputs: int, inputs: int) -> None:
    """Once per shape, not per layer."""
    _log.warning("weights=int4: no fast 4-bit kernel here for a layer of %d x %d; it runs in float32.", outputs, inputs)


def int4_head(weight: Tensor, bias: Tensor | None) -> Linear:
    """The output head of a model with 4-bit layers: in 8 bits if that is fast, else in float32."""
    if library() and weight.shape[1] % GROUP == 0:
        return NativeInt8Linear(weight, bias)
    if _has_x86_kernels() and _has_int8_kernels():
        return DynamicInt8Linear(weight, bias)
    return FloatLinear(weight, bias, packs=can_pack())


class SplitLinear(Linear):
    """A native form of a weight for few rows, another form for many."""

    native: NativeMatrix

    def __init__(self, native: NativeMatrix, many: Linear) -> None:
        self.native = native
        self._many = many

    def __call__(self, rows: Tensor) -> Tensor:
        return self.native(rows) if len(rows) <= self.native.max_rows else self._many(rows)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        form = self.native if len(rows) <= self.native.max_rows else self._many
        return form.add_to(residual, rows)


class NativeInt4Linear(SplitLinear):
    """4-bit weights by float32 activations for few rows, the same weights in this CPU's fastest form for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        codes, scales, zeros = quantise(weight)
        many: Linear
        if _has_arm_kernels():
            max_rows, many = _NATIVE_ROWS_ON_ARM, DynamicInt4Linear(weight, bias)
        else:
            max_rows, many = _NATIVE_ROWS, _dequantised_linear(dequantise(codes, scales, zeros), bias)
        super().__init__(_int4_matrix(codes, scales, zeros, bias, max_rows), many)


class NativeInt8Linear(SplitLinear):
    """8-bit weights by float32 activations for few rows, with a scale per group like Q8_0 files; float32 for many."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(_int8_matrix(weight, bias, _NATIVE_ROWS), FloatLinear(weight, bias))


def fixed_order_int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """By the native kernels, whose results do not depend on the number of rows, for any number of them."""
    if weight.shape[1] % GROUP:
        return fixed_order_linear(weight, bias)
    return NativeLinear(_int4_matrix(*quantise(weight), bias, ANY_ROWS))


def fixed_order_int8_head(weight: Tensor, bias: Tensor | None) -> Linear:
    return (
        fixed_order_linear(weight, bias)
        if weight.shape[1] % GROUP
        else NativeLinear(_int8_matrix(weight, bias, ANY_ROWS))
    )


def _int4_matrix(codes: Tensor, scales: Tensor, zeros: Tensor, bias: Tensor | None, max_rows: int) -> NativeMatrix:
    return quantised_matrix(codes + 8, scales, zeros - 8 * scales, bias, num_bits=4, max_rows=max_rows)


def _int8_matrix(weight: Tensor, bias: Tensor | None, max_rows: int) -> NativeMatrix:
    groups = weight.view(len(weight), -1, GROUP)
    scales = _no_zeros((groups.abs().amax(-1) / 127).half().float())
    codes = (groups / scales.unsqueeze(-1)).round_().clamp_(-128, 127).add_(128).view(weight.shape)
    return quantised_matrix(codes, scales, -128 * scales, bias, num_bits=8, max_rows=max_rows)


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
    """Whether this build has oneDNN's 8-bit product, and gets it right."""
    is_supported = getattr(torch.cpu, "_is_vnni_supported", None)
    if is_supported is None or not is_supported():
        return False
    return computes_products(lambda rows, weight: DynamicInt8Linear(weight, None)(rows), torch.float32, tolerance=0.05)


class DynamicInt8Linear(Linear):
    """8-bit weights with one scale per output, by activations quantised row by row: rows do not affect each other."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._bias = bias
        self._scales = weight.abs().amax(1).clamp_(min=1e-12).div_(127)
        self._zeros = torch.zeros(len(weight), dtype=torch.int64)
        codes = (weight / self._scales.unsqueeze(1)).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(codes, None)

    def __call__(self, rows: Tensor) -> Tensor:
        peaks = torch.linalg.vector_norm(rows, math.inf, -1, True).clamp_(min=1e-30)
        codes = (rows * (127 / peaks)).round_().to(torch.int8)
        product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
            codes, 1 / 127, 0, self._packed, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        product.mul_(peaks)
        return product if self._bias is None else product.add_(self._bias)


class DynamicInt4Linear(Linear):
    """4-bit weights by activations quantised row by row to 8 bits: `_dyn_quant_matmul_4bit`, made for ARM.

    The kernel has scales but no zeros, so these are a second, small product: each group's zero by the sum of its
    inputs. Without them, Q4_1 weights would be rounded again, at a fourth more perplexity.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        codes, scales, zeros = quantise(weight, torch.bfloat16)
        nibbles = (codes + 8).to(torch.uint8)
        self._packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
            nibbles[:, 1::2] << 4 | nibbles[:, ::2], scales.bfloat16(), bias, GROUP, self._inputs, self._outputs
        )
        self._zeros = zeros.t().contiguous()

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.aten._dyn_quant_matmul_4bit.default(
            rows, self._packed, GROUP, self._inputs, self._outputs
        )
        return product.addmm_(rows.view(rows.shape[0], -1, GROUP).sum(-1), self._zeros)


class Bfloat16Linear(Linear):
    """Weights and activations in 16 bits, products summed in 32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = pack(weight.bfloat16())
        self._bias = bias

    def __call__(self, rows: Tensor) -> Tensor:
        product = packed_linear(rows.bfloat16(), self._packed).float()
        return product if self._bias is None else product.add_(self._bias)


def _dequantised_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """For many rows, which no longer wait for memory."""
    return Bfloat16Linear(weight, bias) if _has_fast_bfloat16() else FloatLinear(weight, bias)


class WeightOnlyInt4Linear(Linear):
    """Torch's 4-bit weights by bfloat16 activations for a few rows, the same weights in 16 or 32 bits for more."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        codes, scales, zeros = quantise(weight, torch.bfloat16)
        self._bias = bias
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int() + 8, 1)
        self._scales_zeros = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous().bfloat16()
        self._many = _dequantised_linear(dequantise(codes, scales, zeros), bias)

    def __call__(self, rows: Tensor) -> Tensor:
        if len(rows) > _TORCH_ROWS:
            return self._many(rows)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
            rows.bfloat16(), self._packed, GROUP, self._scales_zeros
        ).float()
        return product if self._bias is None else product.add_(self._bias)


def quantise(weight: Tensor, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in [-8, 7], and a scale and a zero per group: weight = code x scale + zero.

    Each group takes the better of two ways, so that weights of Q4_1 and Q4_0 files come out unchanged: map the lowest
    and highest to -8 and 7, or let zero be 0 and map the value farthest from it to -8. Scales are rounded to `dtype`
    first, and so are zeros if the kernels hold them in bfloat16.
    """
    groups = weight.view(len(weight), -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = _no_zeros(((highest - lowest) / 15).to(dtype).float())
    zeros = lowest + 8 * scales
    if dtype == torch.bfloat16:
        zeros = zeros.bfloat16().float()
    codes, errors = _nearest_codes(groups, scales, zeros)
    if errors.any():
        farthest = torch.where(highest > -lowest, highest, lowest)
        other_scales, other_zeros = _no_zeros((farthest / -8).to(dtype).float()), torch.zeros_like(zeros)
        other_codes, other_errors = _nearest_codes(groups, other_scales, other_zeros)
        is_better = other_errors < errors
        codes = torch.where(is_better, other_codes, codes)
        scales, zeros = torch.where(is_better, other_scales, scales), torch.where(is_better, other_zeros, zeros)
    return codes.to(torch.int8).view(weight.shape), scales.squeeze(-1), zeros.squeeze(-1)


def _nearest_codes(groups: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes, and each group's sum of squared errors."""
    codes = (groups - zeros).div_(scales).round_().clamp_(-8, 7)
    errors = (codes * scales).add_(zeros).sub_(groups).square_().sum(-1, keepdim=True)
    return codes, errors


def _no_zeros(scales: Tensor) -> Tensor:
    """Scales safe to divide by: for a group of equal weights any scale will do."""
    return scales.masked_fill_(scales == 0, 1.0)


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight that these codes stand for."""
    groups = codes.view(len(codes), -1, GROUP) * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    return groups.view(codes.shape)
