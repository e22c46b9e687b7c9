"""The deterministic linear layer: torch's values, and the same bits in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.model.cuda.triton_device import DEVICE, HALF, HAS_CUDA, on_cuda

pytestmark = on_cuda

from evenflow.model.cuda import deterministic  # noqa: E402


def _layer(rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, inputs), (outputs, inputs), (outputs,))
    left, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return left, weight / inputs**0.5, bias


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 72, 48), (70, 264, 300), (200, 384, 64)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_matches_torch(dtype: torch.dtype, rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    left, weight, bias = _layer(rows, inputs, outputs, dtype)
    expected = torch.nn.functional.linear(left.double(), weight.double(), bias.double() if has_bias else None)
    found = deterministic.linear(left, weight, bias if has_bias else None)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found, expected.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not HAS_CUDA, reason="the interpreter's matrix product depends on the shapes of tiles; needs CUDA")
@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 6144), (4096, 4096), (14336, 4096), (576, 1536), (1000, 504)])
def test_the_bits_do_not_depend_on_the_batch(inputs: int, outputs: int) -> None:
    rows, weight, bias = _layer(3000, inputs, outputs, torch.bfloat16)
    expected = deterministic.linear(rows, weight, bias)
    for first, last in ((0, 1), (7, 8), (5, 69), (100, 165), (0, 64), (8, 136), (0, 600), (0, 2048), (1000, 3000)):
        assert torch.equal(deterministic.linear(rows[first:last], weight, bias), expected[first:last]), (first, last)


@pytest.mark.skipif(not HAS_CUDA, reason="the library is used on a GPU alone; needs CUDA")
def test_a_library_that_sums_in_another_order_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(torch.nn.functional.linear(rows.flip(1), weight.flip(1).contiguous(), bias))

    rows, weight, bias = _layer(128, 4096, 512, torch.bfloat16)
    expected = deterministic.linear(rows, weight, bias)
    monkeypatch.setattr(deterministic, "_agreements", {})
    monkeypatch.setattr(deterministic, "library_linear", backwards)
    assert torch.equal(deterministic.linear(rows, weight, bias), expected)


def test_rows_next_to_it_do_not_change_a_row() -> None:
    rows, weight, bias = _layer(40, 96, 64, torch.float32)
    expected = deterministic.linear(rows, weight, bias)
    assert torch.equal(deterministic.linear(rows.flip(0), weight, bias).flip(0), expected)
    assert torch.equal(deterministic.linear(rows[3:20], weight, bias), expected[3:20])


def test_takes_no_rows() -> None:
    weight = torch.ones(32, 16, device=DEVICE)
    assert deterministic.linear(torch.empty(0, 16, device=DEVICE), weight).shape == (0, 32)
