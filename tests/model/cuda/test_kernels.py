"""The fused Triton kernels against plain torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.model.cuda.triton_device import DEVICE, DTYPES, on_cuda

pytestmark = on_cuda

from evenflow.model.cuda import kernels, reference_ops  # noqa: E402
from evenflow.model.cuda.attention.gather import gather_kv  # noqa: E402
from evenflow.model.cuda.attention.merge import merge_parts  # noqa: E402


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def _tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 2e-2


def _assert_close(found: Tensor, expected: Tensor) -> None:
    tolerance = _tolerance(expected.dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 72), (3, 576)])
@pytest.mark.parametrize("has_update", [True, False])
def test_adds_and_norms(dtype: torch.dtype, rows: int, hidden: int, has_update: bool) -> None:
    residual, weight = _random(rows, hidden, dtype=dtype), _random(hidden, dtype=dtype, seed=1)
    update = _random(rows, 2 * hidden, dtype=dtype, seed=2)[:, :hidden] if has_update else None
    expected_residual = residual.clone()
    expected = reference_ops.add_rms_norm(expected_residual, update, weight, 1e-5)
    _assert_close(kernels.add_rms_norm(residual, update, weight, 1e-5), expected)
    _assert_close(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 16), (4, 1100), (3, 2048)])
def test_activates(dtype: torch.dtype, rows: int, width: int) -> None:
    gate_up = _random(rows, 2 * width, dtype=dtype)
    _assert_close(kernels.silu_mul(gate_up), reference_ops.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [(4, 1, 64, 64), (9, 3, 80, 32), (6, 2, 16, 0), (14, 2, 96, 96)],
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_rotates_and_writes_kv(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, has_norm: bool
) -> None:
    rows, block_size = 5, 16
    packed = _random(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    memory = _random(4, 6, block_size, num_kv_heads, head_dim, dtype=dtype, seed=1)
    slots = torch.tensor([17, -1, 0, 63, 16], device=DEVICE)
    angles = _random(rows, rotary_dim // 2, seed=2)
    rotation = (angles.cos(), angles.sin()) if rotary_dim else None
    norms = (_random(head_dim, dtype=dtype, seed=3), _random(head_dim, dtype=dtype, seed=4)) if has_norm else None
    found = []
    for operations in (reference_ops, kernels):
        rows_copy, memory_copy = packed.clone(), memory.clone()
        kv = memory_copy[:, 2:4]  # one layer of a larger tensor: other strides than its shape suggests
        queries = operations.rope_and_write_kv(rows_copy, num_heads, kv, slots, rotation, norms, 1e-6)
        found.append((queries.clone(), memory_copy))
    for expected, result in zip(*found, strict=True):
        _assert_close(result, expected)


def test_takes_no_rows() -> None:
    empty = torch.empty(0, 64, device=DEVICE)
    assert kernels.add_rms_norm(empty, empty, torch.ones(64, device=DEVICE), 1e-5).shape == (0, 64)
    assert kernels.silu_mul(empty).shape == (0, 32)
    kv = torch.zeros(1, 2, 16, 1, 16, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert kernels.rope_and_write_kv(empty, 2, kv, slots, None, None, 1e-5).shape == (0, 2, 16)


@pytest.mark.parametrize("width", [5, 4096, 10_000, 128_256])
def test_finds_the_largest(width: int) -> None:
    logits = _random(4, width)
    logits[1, [3, width - 1]] = 50.0  # the first of equal ones
    logits[2, width // 2] = torch.nan
    logits[3] = -torch.inf
    tokens, bits = kernels.largest(logits)
    assert tokens[[0, 1, 3]].tolist() == [logits[0].argmax().item(), 3, 0]
    largest = bits.view(torch.float32)
    assert largest[[0, 1, 3]].tolist() == [logits[0].max().item(), 50.0, -torch.inf]
    assert largest[2].isnan()


def test_gathers_keys_and_values() -> None:
    kv, lengths = _random(9, 2, 16, 3, 40, dtype=torch.bfloat16), [33, 1, 48]
    tables = torch.tensor([[8, 2, 5], [1, 0, 0], [7, 3, 6]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 33, 34, 82], dtype=torch.int32, device=DEVICE)
    gathered = torch.zeros(2, 90, 3, 40, dtype=torch.bfloat16, device=DEVICE)
    gather_kv(kv, tables, starts, 48, gathered)
    expected = [
        kv[table.long()].transpose(0, 1).flatten(1, 2)[:, :length]
        for table, length in zip(tables, lengths, strict=True)
    ]
    assert torch.equal(gathered[:, :82], torch.cat(expected, dim=1))
    assert not gathered[:, 82:].any()


def test_merges_parts_of_a_context() -> None:
    """Rows 0 and 1 have two parts, row 2 none."""
    scores, values = 4 * _random(3, 10, 48), _random(3, 10, 48, 40)
    first, second, last = slice(0, 4), slice(4, 13), slice(13, 48)

    def attend(row: int, span: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = scores[row, :, span]
        return torch.einsum("hp,hpd->hd", part.softmax(1), values[row, :, span]), part.logsumexp(1) / math.log(2)

    own = [attend(row, last) for row in range(3)]
    parts = [attend(row, span) for span in (first, second) for row in range(2)]
    output, log_sums, part_outputs, part_log_sums = (
        torch.stack(each) for each in (*zip(*own, strict=True), *zip(*parts, strict=True))
    )
    merges = torch.tensor([[0, 2, 2], [1, 2, 2], [4, 1, 0]], dtype=torch.int32, device=DEVICE)
    alone = output[2].clone()
    merge_parts(output, log_sums, part_outputs, part_log_sums, merges)
    for row in (0, 1):
        torch.testing.assert_close(output[row], attend(row, slice(0, 48))[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(output[2], alone)
