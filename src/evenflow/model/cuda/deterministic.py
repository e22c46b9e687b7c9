"""Operations whose rows come out bitwise the same in any batch: the deterministic mode's matrix product, in Triton.

Implements `Operations`; the others work row by row already. A library's product picks its kernel by the number of rows,
and with it the order of the sums. Here every output is summed in the same order: within a part of `_PART` inputs by the
tensor cores, 16 inputs at a time, then part by part. Tiles differ only in which outputs they hold. Import this module
only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from evenflow.model.cuda import kernels
from evenflow.model.cuda.limits import Limits, limits_of

add_rms_norm = kernels.add_rms_norm
rope_and_write_kv = kernels.rope_and_write_kv
silu_mul = kernels.silu_mul
largest = kernels.largest

_PART = 4096  # inputs; parts can run in parallel, so that few rows fill the GPU
_MERGE_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class _Tiling:
    """`splits` says whether each part of the inputs has a program of its own."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    splits: bool


def _tiling(num_rows: int, num_columns: int, num_parts: int, dtype: torch.dtype, limits: Limits) -> _Tiling:
    """The widest tiles that still fill the GPU."""
    if dtype == torch.float32:
        return _Tiling(64, 64, 32, 4, 3, splits=False)
    rows, num_warps = (64, 4) if num_rows <= 64 else (128, 8)
    for splits in (False, True):
        widest = 128 if num_parts > 1 and not splits else 256  # two sums in registers, or one
        columns = widest
        while columns > 32:
            num_tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns) * (num_parts if splits else 1)
            if num_tiles >= 0.9 * limits.num_processors:
                stage_bytes = (rows + columns) * 64 * dtype.itemsize
                return _Tiling(rows, columns, 64, num_warps, min(4, limits.shared_memory // stage_bytes), splits)
            columns //= 2
    return _Tiling(rows, 32, 128 if rows == 64 else 64, num_warps, 4, splits=num_parts > 1)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Rows times the weight's rows, plus the bias; each row's result depends on that row alone, bit by bit."""
    (num_rows, num_inputs), num_columns = rows.shape, weight.shape[0]
    if num_inputs * rows.itemsize % 16 or num_inputs != weight.shape[1]:
        raise ValueError(
            f"Got {num_inputs} inputs, but expected {weight.shape[1]}, with rows of a multiple of 16 bytes."
        )
    output = rows.new_empty(num_rows, num_columns) if out is None else out
    assert output.is_contiguous(), "the kernel writes rows one after another"
    if num_rows == 0:
        return output
    num_parts = triton.cdiv(num_inputs, _PART)
    tiling = _tiling(num_rows, num_columns, num_parts, rows.dtype, limits_of(rows.device))
    parts = output
    if tiling.splits:
        parts = torch.empty(num_parts, num_rows, num_columns, dtype=torch.float32, device=rows.device)
    num_tiles = triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns)
    # Descriptors let the GPU's copy engine compute addresses and fill what lies outside with zeros.
    _multiply[(num_tiles, num_parts if tiling.splits else 1)](
        TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.depth]),
        output if bias is None else bias,
        parts,
        num_rows,
        num_columns,
        num_inputs,
        PART=_PART,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        SPLITS=tiling.splits,
        HAS_PARTS=num_parts > 1,
        HAS_BIAS=bias is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if tiling.splits:
        _add_parts[(num_rows, triton.cdiv(num_columns, _MERGE_BLOCK))](
            parts,
            output if bias is None else bias,
            output,
            num_columns,
            parts.stride(0),
            NUM_PARTS=num_parts,
            HAS_BIAS=bias is not None,
            BLOCK=_MERGE_BLOCK,
        )
    return output


@triton.jit
def _multiply(
    rows: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_inputs: tl.tensor,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row_tile, column_tile = _tile(tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS))
    row, column = row_tile * ROWS, column_tile * COLUMNS
    if SPLITS:
        begin = tl.program_id(1) * PART
        total = _sum_part(rows, weight, row, column, begin, tl.minimum(begin + PART, num_inputs), ROWS, COLUMNS, DEPTH)
    elif HAS_PARTS:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, num_inputs, PART):
            end = tl.minimum(begin + PART, num_inputs)
            total += _sum_part(rows, weight, row, column, begin, end, ROWS, COLUMNS, DEPTH)
    else:
        total = _sum_part(rows, weight, row, column, 0, num_inputs, ROWS, COLUMNS, DEPTH)
    columns = column + tl.arange(0, COLUMNS)
    if HAS_BIAS and not SPLITS:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    target = output + row.to(tl.int64) * num_columns
    if SPLITS:
        target += tl.program_id(1).to(tl.int64) * num_rows * num_columns
    row_in_tile = tl.arange(0, ROWS)
    inside = (row + row_in_tile < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = row_in_tile[:, None] * num_columns + columns[None, :]
    tl.store(target + offsets, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _tile(num_row_tiles: tl.tensor, num_column_tiles: tl.tensor) -> tl.tuple:
    """Programs that run together share rows and columns: eight row tiles at a time, column by column."""
    index = tl.program_id(0)
    band = index // (8 * num_column_tiles)
    band_height = tl.minimum(num_row_tiles - 8 * band, 8)
    index_in_band = index % (8 * num_column_tiles)
    return 8 * band + index_in_band % band_height, index_in_band // band_height


@triton.jit
def _sum_part(
    rows: tl.tensor,
    weight: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin, end, DEPTH):
        left, right = rows.load([row, first]), weight.load([column, first])
        total = tl.dot(left, right.T, total, input_precision="ieee")
    return total


@triton.jit
def _add_parts(
    parts: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_columns: tl.tensor,
    part_stride: tl.tensor,
    NUM_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    source = tl.program_id(0).to(tl.int64) * num_columns + column
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(NUM_PARTS):
        total += tl.load(parts + part * part_stride.to(tl.int64) + source, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + source, total.to(output.dtype.element_ty), mask=inside)
