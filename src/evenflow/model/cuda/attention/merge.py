"""Merges the attention results of parts of a context. Import this module only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_HEADS_AT_ONCE = 8


def merge_parts(output: Tensor, log_sums: Tensor, parts: Tensor, part_log_sums: Tensor, merges: Tensor) -> None:
    """Merge the parts in `merges` into `output` [rows, heads, head dim]; see `ContextParts`.

    Logarithms, to base 2, are of the divisors of each output: [rows, heads].
    """
    num_rows, num_heads, head_dim = output.shape
    assert output[0].is_contiguous()
    _merge[(num_rows, triton.cdiv(num_heads, _HEADS_AT_ONCE))](
        output,
        log_sums,
        parts,
        part_log_sums,
        merges,
        output.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=_HEADS_AT_ONCE,
        VALUES=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _merge(
    output: tl.tensor,
    log_sums: tl.tensor,
    parts: tl.tensor,
    part_log_sums: tl.tensor,
    merges: tl.tensor,
    output_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part_row = tl.load(merges + 3 * row).to(tl.int64)
    distance, count = tl.load(merges + 3 * row + 1), tl.load(merges + 3 * row + 2)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    values = tl.arange(0, VALUES)
    places = heads[:, None] * HEAD_DIM + values[None, :]
    inside = (heads[:, None] < NUM_HEADS) & (values[None, :] < HEAD_DIM)
    largest = tl.load(log_sums + row * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=0.0)
    merged = tl.load(output + row * output_stride + places, mask=inside, other=0.0).to(tl.float32)
    weights = tl.full((HEADS,), 1.0, tl.float32)
    for _ in range(count):
        log_sum = tl.load(part_log_sums + part_row * NUM_HEADS + heads, mask=heads < NUM_HEADS, other=0.0)
        part = tl.load(parts + part_row * NUM_HEADS * HEAD_DIM + places, mask=inside, other=0.0).to(tl.float32)
        both = tl.maximum(largest, log_sum)
        scale, part_scale = tl.exp2(largest - both), tl.exp2(log_sum - both)
        merged = merged * scale[:, None] + part * part_scale[:, None]
        weights = weights * scale + part_scale
        largest = both
        part_row += distance
    merged = merged / weights[:, None]
    tl.store(output + row * output_stride + places, merged.to(output.dtype.element_ty), mask=inside)
