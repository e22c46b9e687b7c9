"""Linear layers with 4-bit weights (8-bit for the output head), by what torch runs fast on this machine.

Knows matrices; knows nothing of the model they belong to. `benchmarks/int4_perplexity.py` measures what it costs in
quality, `benchmarks/cpu_ops.py` in time.

Weights are quantised in groups of 32 inputs, each with a scale and a zero. On ARM torch multiplies them by activations
quantised to 8 bits. On x86 it multiplies them by bfloat16 activations, fast for a few rows; more rows run on the same
values, spelled out in bfloat16 for the CPU's matrix units. The output head loses most by 4 bits and is a fifth of a
small model: it takes 8, or stays as it is.
"""

from __future__ import annotations

import functools
import logging
import math
import platform

import torch
from torch import Tensor

from evenflow.model.linear import FloatLinear, Linear, can_pack, pack, packed_linear

_log = logging.getLogger(__name__)

GROUP = 32  # inputs that share a scale
_INT4_ROWS = 4  # up to which unpacking 4-bit weights beats reading them in 16 bits


def int4_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """The best 4-bit form of a layer here, or its float32 form where there is none."""
    outputs, inputs = weight.shape
    if inputs % GROUP == 0 and outputs % GROUP == 0:
        if _has_arm_kernels():
            return DynamicInt4Linear(weight, bias)
        if _has_x86_kernels():
            return WeightOnlyInt4Linear(weight, bias)
    _say_float32(outputs, inputs)
    return FloatLinear(weight, bias)


@functools.cache
def _say_float32(outputs: int, inputs: int) -> None:
    """Once a shape, not once a layer."""
    _log.warning("weights=int4: no fast 4-bit kernel here for a layer of %d x %d; it runs in float32.", outputs, inputs)


def int4_head(weight: Tensor, bias: Tensor | None) -> Linear:
    """The output head beside 4-bit layers: in 8 bits where that is fast, else in float32."""
    if _has_x86_kernels() and _has_int8_kernels():
        return DynamicInt8Linear(weight, bias)
    return FloatLinear(weight, bias, packs=can_pack())


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


class DynamicInt8Linear:
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

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.add_(self(rows))


class DynamicInt4Linear:
    """4-bit weights by activations quantised row by row to 8 bits: `_dyn_quant_matmul_4bit`, made for ARM.

    The kernel knows scales and no zeros, so these are a second, small product: each group's zero by the sum of its
    inputs. Without them, what a Q4_1 file holds would be rounded once more, at a fourth more perplexity.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        numbers, scales, zeros = quantise(weight)
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

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.add_(self(rows))


class WeightOnlyInt4Linear:
    """4-bit weights by bfloat16 activations for a few rows, the same weights in 16 or 32 bits for more."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        numbers, scales, zeros = quantise(weight)
        self._bias = bias
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.int() + 8, 1)
        self._scales_zeros = torch.stack((scales, zeros), -1).transpose(0, 1).contiguous().bfloat16()
        spelled_out = dequantise(numbers, scales, zeros)
        self._many = None if _has_fast_bfloat16() else FloatLinear(spelled_out, bias)
        self._wide = pack(spelled_out.bfloat16()) if self._many is None else None

    def __call__(self, rows: Tensor) -> Tensor:
        return self._product(rows).float()

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        return residual.add_(self._product(rows))

    def _product(self, rows: Tensor) -> Tensor:
        if rows.shape[0] > _INT4_ROWS:
            if self._many is not None:
                return self._many(rows)
            assert self._wide is not None
            product = packed_linear(rows.bfloat16(), self._wide)
        else:
            product = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
                rows.bfloat16(), self._packed, GROUP, self._scales_zeros
            )
        return product if self._bias is None else product + self._bias


def quantise(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers in [-8, 7], a scale and a zero a group: weight = number x scale + zero.

    The lowest and highest of a group become -8 and 7, so that weights which were quantised like this before, as those
    of Q4_1 files, come out as they were. Scales and zeros are rounded first: the kernels see them in bfloat16.
    """
    groups = weight.view(len(weight), -1, GROUP)
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    scales = ((highest - lowest) / 15).bfloat16().float()
    scales[scales == 0] = 1.0
    zeros = (lowest + 8 * scales).bfloat16().float()
    numbers = (groups - zeros).div_(scales).round_().clamp_(-8, 7)
    return numbers.to(torch.int8).view(weight.shape), scales.squeeze(-1), zeros.squeeze(-1)


def dequantise(numbers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The weight that these numbers stand for."""
    groups = numbers.view(len(numbers), -1, GROUP) * scales.unsqueeze(-1) + zeros.unsqueeze(-1)
    return groups.view(numbers.shape)
