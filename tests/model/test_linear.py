"""Every form of a linear layer against the plain product with its weight."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.cpu import int4
from evenflow.model.cpu.int4 import DynamicInt4Linear, DynamicInt8Linear, WeightOnlyInt4Linear, dequantise, quantise
from evenflow.model.cpu.linear import FloatLinear, Linear, can_pack

ROWS = (1, 2, 4, 5, 6, 23, 24, 48, 100)
BIASES = pytest.mark.parametrize("has_bias", [False, True])


def matrices(outputs: int = 96, inputs: int = 64, has_bias: bool = False) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(outputs)
    weight = torch.randn(outputs, inputs, generator=generator)
    return weight, torch.randn(outputs, generator=generator) if has_bias else None


def inputs_for(weight: Tensor, rows: int) -> Tensor:
    return torch.randn(rows, weight.shape[1], generator=torch.Generator().manual_seed(rows))


def assert_close(linear: Linear, weight: Tensor, bias: Tensor | None, relative: float) -> None:
    """For all numbers of rows, within a share of the outputs' spread; `add_to` adds the same."""
    with torch.inference_mode():
        for count in ROWS:
            rows = inputs_for(weight, count)
            expected = F.linear(rows, weight, bias)
            tolerance = relative * float(expected.std())
            torch.testing.assert_close(linear(rows), expected, atol=tolerance, rtol=0)
            residual = torch.ones_like(expected)
            torch.testing.assert_close(linear.add_to(residual, rows), expected + 1, atol=tolerance, rtol=0)


@BIASES
@pytest.mark.parametrize(
    "packs", [False, pytest.param(True, marks=pytest.mark.skipif(not can_pack(), reason="no oneDNN"))]
)
def test_float32_is_the_product_for_any_number_of_rows(packs: bool, has_bias: bool) -> None:
    weight, bias = matrices(1024, 512, has_bias=has_bias)
    assert_close(FloatLinear(weight, bias, packs=packs), weight, bias, 1e-4)


def test_quantised_numbers_stand_for_the_weight_within_half_a_step() -> None:
    weight, _ = matrices()
    numbers, scales, zeros = quantise(weight)
    assert (int(numbers.min()), int(numbers.max())) == (-8, 7)
    error = (dequantise(numbers, scales, zeros) - weight).abs().view(96, -1, int4.GROUP)
    # Half a step, or a whole one at the ends of a group with zero 0, plus the error of rounding the scale.
    steps = torch.where(zeros == 0, 1.0, 0.5) + 16 / 2048
    assert (error <= (scales.abs() * steps).unsqueeze(-1)).all()


def test_weights_that_were_quantised_before_come_out_as_they_were() -> None:
    numbers = torch.randint(0, 16, (64, 3, int4.GROUP), generator=torch.Generator().manual_seed(0))
    numbers[..., 0], numbers[..., 1] = 0, 15
    weight = (numbers * 0.25 - 1.5).view(64, -1)
    assert torch.equal(dequantise(*quantise(weight)), weight)


def test_a_group_of_equal_weights_survives() -> None:
    weight = torch.full((32, 64), 0.5)
    weight[:, 32:] = 0.0
    assert torch.equal(dequantise(*quantise(weight)), weight)


@BIASES
@pytest.mark.parametrize(
    ("form", "relative"),
    [(WeightOnlyInt4Linear, 0.05), (DynamicInt4Linear, 0.1)],  # the error of 16-bit or 8-bit activations
)
def test_int4_is_the_product_of_the_dequantised_weight(
    form: Callable[[Tensor, Tensor | None], Linear], relative: float, has_bias: bool
) -> None:
    weight, bias = matrices(has_bias=has_bias)
    assert_close(form(weight, bias), dequantise(*quantise(weight, torch.bfloat16)), bias, relative)


@pytest.mark.skipif(not int4._has_int8_kernels(), reason="no 8-bit kernels on this machine")
@BIASES
def test_int8_is_close_and_each_row_is_its_own(has_bias: bool) -> None:
    weight, bias = matrices(has_bias=has_bias)
    linear = DynamicInt8Linear(weight, bias)
    assert_close(linear, weight, bias, 0.1)
    rows = inputs_for(weight, 5)
    rows[1] *= 1000
    rows[3] = float("nan")
    together = linear(rows)
    torch.testing.assert_close(together[0], linear(rows[:1])[0])
    assert together[3].isnan().all()


@pytest.mark.parametrize("shape", [(96, 48), (40, 64)])
def test_a_layer_that_fits_no_kernel_runs_in_float32_and_says_so_once(
    shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    weight, bias = matrices(*shape)
    with caplog.at_level(logging.WARNING):
        linear = int4.int4_linear(weight, bias)
        int4.int4_linear(weight, bias)
    assert_close(linear, weight, bias, 1e-5)
    assert caplog.text.count(f"{shape[0]} x {shape[1]}") == 1


def test_what_is_chosen_here_is_close_to_the_weight() -> None:
    weight, bias = matrices(128, 128, has_bias=True)
    assert_close(int4.int4_linear(weight, bias), weight, bias, 0.6)
    assert_close(int4.int4_head(weight, None), weight, None, 0.1)
