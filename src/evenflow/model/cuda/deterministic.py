"""The matrix product of the deterministic mode: each row's result is bitwise the same in any batch.

Implements `Operations`; all other operations work row by row. A library chooses its kernel, and so the order of sums,
by the number of rows. Here every output is summed in one order, 16 inputs at a time from first to last, as tensor cores
do: by a Triton kernel, whose tile size does not change the order, or by the library for row counts with the same bits.
Import this module only where Triton is installed.
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
from evenflow.model.cuda.operations import library_linear

add_rms_norm = kernels.add_rms_norm
rope_and_write_kv = kernels.rope_and_write_kv
silu_mul = kernels.silu_mul
largest = kernels.largest

_MAX_ROWS = 2048  # per product; more are cut into pieces, which limits the row counts to compare
_ROWS_COMPARED = 8  # row counts compared: its multiples and divisors, which include the captured graphs'
_agreements: dict[tuple[object, ...], bool] = {}  # whether the library gives the same bits


@dataclass(frozen=True, slots=True)
class _Tiling:
    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def _tiling(num_rows: int, num_columns: int, dtype: torch.dtype, limits: Limits) -> _Tiling:
    """For few rows small tiles, so that all processors read the weight; for many, large ones if they fill the GPU."""
    if dtype == torch.float32:
        return _Tiling(64, 64, 32, 4, 3)
    if num_rows <= 32:
        rows, columns, depth = 16, 64, 256
    elif num_rows <= 128:
        rows, columns, depth = 64, 64, 128
    else:
        fills = triton.cdiv(num_rows, 128) * triton.cdiv(num_columns, 128) >= 0.9 * limits.num_processors
        rows, columns, depth = 128 if fills else 64, 128, 64
    stage_bytes = (rows + columns) * depth * dtype.itemsize
    return _Tiling(rows, columns, depth, 8 if rows == 128 else 4, max(2, min(8, limits.shared_memory // stage_bytes)))


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Rows times the weight's rows, plus the bias; each row's result depends bitwise on that row alone."""
    output = rows.new_empty(len(rows), len(weight)) if out is None else out
    for first in range(0, len(rows), _MAX_ROWS):
        piece, target = rows[first : first + _MAX_ROWS], output[first : first + _MAX_ROWS]
        product = library_linear if _library_agrees(piece, weight, bias, target) else own_linear
        product(piece, weight, bias, target)
    return output


def _library_agrees(rows: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> bool:
    """Whether the library sums this many rows in the same order. Tested once, on noise, where any other order shows."""
    if not rows.is_cuda or (len(rows) % _ROWS_COMPARED and _ROWS_COMPARED % len(rows)):
        return False
    key = (len(rows), weight.shape, rows.dtype, output.dtype, bias is None, rows.device)
    if key not in _agreements:
        if torch.cuda.is_current_stream_capturing():
            return False
        noise = torch.empty_like(rows).normal_(generator=torch.Generator(rows.device).manual_seed(0))
        of_library, own = torch.empty_like(output), torch.empty_like(output)
        library_linear(noise, weight, bias, of_library)
        own_linear(noise, weight, bias, own)
        _agreements[key] = torch.equal(of_library, own)
    return _agreements[key]


def own_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor) -> None:
    """The product by the Triton kernel, without the library."""
    (num_rows, num_inputs), num_columns = rows.shape, weight.shape[0]
    if num_inputs * rows.itemsize % 16 or num_inputs != weight.shape[1]:
        raise ValueError(
            f"Got {num_inputs} inputs, but expected {weight.shape[1]}, with rows of a multiple of 16 bytes."
        )
    assert output.is_contiguous(), "the kernel writes rows one after another"
    tiling = _tiling(num_rows, num_columns, rows.dtype, limits_of(rows.device))
    # Descriptors let the GPU's copy engine compute addresses and pad with zeros.
    _multiply[(triton.cdiv(num_rows, tiling.rows) * triton.cdiv(num_columns, tiling.columns),)](
        TensorDescriptor.from_tensor(rows, [tiling.rows, tiling.depth]),
        TensorDescriptor.from_tensor(weight, [tiling.columns, tiling.depth]),
        output if bias is None else bias,
        output,
        num_rows,
        num_columns,
        num_inputs,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        DEPTH=tiling.depth,
        HAS_BIAS=bias is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton.jit
def _multiply(
    rows: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_inputs: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    row_tile, column_tile = _tile(tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS))
    row, column = row_tile * ROWS, column_tile * COLUMNS
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, num_inputs, DEPTH):
        left, right = rows.load([row, first]), weight.load([column, first])
        total = tl.dot(left, right.T, total, input_precision="ieee")
    columns = column + tl.arange(0, COLUMNS)
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=columns < num_columns, other=0.0).to(tl.float32)[None, :]
    row_in_tile = tl.arange(0, ROWS)
    inside = (row + row_in_tile < num_rows)[:, None] & (columns < num_columns)[None, :]
    offsets = row_in_tile[:, None] * num_columns + columns[None, :]
    tl.store(output + row.to(tl.int64) * num_columns + offsets, total.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _tile(num_row_tiles: tl.tensor, num_column_tiles: tl.tensor) -> tl.tuple:
    """Programs that run together share rows and columns: eight row tiles at a time, column by column."""
    index = tl.program_id(0)
    band = index // (8 * num_column_tiles)
    band_height = tl.minimum(num_row_tiles - 8 * band, 8)
    index_in_band = index % (8 * num_column_tiles)
    return 8 * band + index_in_band % band_height, index_in_band // band_height
