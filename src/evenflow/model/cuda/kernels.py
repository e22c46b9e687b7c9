"""The decoder's small operations on a GPU, each fused into one Triton kernel: norms, rotary positions, activation.

Implements `Operations`. A row's result depends on that row alone and is bitwise the same in any batch. Import
this module only where Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenflow.model.cuda.operations import library_linear

linear = library_linear

_HEADS_PER_PROGRAM = 8
_ACTIVATION_BLOCK = 1024
_SEARCH_BLOCK, _SEARCH_PARTS = 4096, 32  # logits per block; maximum parts of a row searched in parallel


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` in place, and return the RMSNorm of the sum; rows are [rows, hidden]."""
    rows, hidden = residual.shape
    normed = torch.empty_like(residual)
    if rows == 0:
        return normed
    block = triton.next_power_of_2(hidden)
    _add_rms_norm[(rows,)](
        residual,
        residual if update is None else update,
        weight,
        normed,
        eps,
        hidden,
        residual.stride(0),
        residual.stride(0) if update is None else update.stride(0),
        normed.stride(0),
        HAS_UPDATE=update is not None,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )
    return normed


def rope_and_write_kv(
    packed: Tensor,
    num_heads: int,
    kv: Tensor,
    slots: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    query_key_norm: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to KV memory; returns the queries, changed in place.

    A row with a negative slot is padding: its keys and values are not written.
    """
    rows = packed.shape[0]
    block_size, num_kv_heads, head_dim = kv.shape[2:]
    queries = packed.view(rows, num_heads + 2 * num_kv_heads, head_dim)[:, :num_heads]
    if rows == 0:
        return queries
    cos, sin = rotation or (packed, packed)
    query_norm, key_norm = query_key_norm or (packed, packed)
    _rope_and_write_kv[(rows, triton.cdiv(num_heads + 2 * num_kv_heads, _HEADS_PER_PROGRAM))](
        packed,
        kv,
        slots,
        cos,
        sin,
        query_norm,
        key_norm,
        eps,
        packed.stride(0),
        cos.stride(0),
        *kv.stride()[:4],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        NUM_PAIRS=cos.shape[1] if rotation else 0,
        HAS_NORM=query_key_norm is not None,
        BLOCK_SIZE=block_size,
        HEADS=_HEADS_PER_PROGRAM,
        BLOCK=triton.next_power_of_2(head_dim),
    )
    return queries


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    product = gate_up.new_empty(rows, width)
    if rows == 0:
        return product
    _silu_mul[(rows, triton.cdiv(width, _ACTIVATION_BLOCK))](
        gate_up, product, width, gate_up.stride(0), product.stride(0), BLOCK=_ACTIVATION_BLOCK
    )
    return product


def largest(logits: Tensor) -> Tensor:
    """The most likely token of each row and the bits of its logit, a NaN if the row has one: int32 [2, rows]."""
    rows, width = logits.shape
    found = torch.empty(2, rows, dtype=torch.int32, device=logits.device)
    if rows == 0:
        return found
    num_parts = min(_SEARCH_PARTS, triton.next_power_of_2(triton.cdiv(width, _SEARCH_BLOCK)))
    part_width = triton.cdiv(triton.cdiv(width, num_parts), _SEARCH_BLOCK) * _SEARCH_BLOCK
    parts = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    part_tokens = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
    _search[(rows, num_parts)](
        logits, parts, part_tokens, width, logits.stride(0), part_width, BLOCK=_SEARCH_BLOCK, num_warps=8
    )
    _largest_of_parts[(rows,)](parts, part_tokens, found, rows, NUM_PARTS=num_parts, num_warps=1)
    return found


@triton.jit
def _search(
    logits: tl.tensor,
    parts: tl.tensor,
    part_tokens: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    part_width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * part_width
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    token = tl.zeros((BLOCK,), tl.int32) + tl.minimum(begin, width - 1)
    is_nan = tl.zeros((BLOCK,), tl.int32)
    for first in range(begin, tl.minimum(begin + part_width, width), BLOCK):
        column = first + columns
        value = tl.load(logits + row * stride + column, mask=column < width, other=float("-inf"))
        is_nan |= (value != value).to(tl.int32)
        is_larger = value > best
        best, token = tl.where(is_larger, value, best), tl.where(is_larger, column, token)
    value = tl.max(best, axis=0)
    first_token = tl.min(tl.where(best == value, token, 2147483647), axis=0)
    value = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), value)
    tl.store(parts + row * tl.num_programs(1) + part, value)
    tl.store(part_tokens + row * tl.num_programs(1) + part, first_token)


@triton.jit
def _largest_of_parts(
    parts: tl.tensor, part_tokens: tl.tensor, found: tl.tensor, rows: tl.tensor, NUM_PARTS: tl.constexpr
) -> None:
    row = tl.program_id(0)
    part = row * NUM_PARTS + tl.arange(0, NUM_PARTS)
    values, tokens = tl.load(parts + part), tl.load(part_tokens + part)
    is_nan = tl.max((values != values).to(tl.int32), axis=0) > 0
    value = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    token = tl.min(tl.where(values == value, tokens, 2147483647), axis=0)
    tl.store(found + row, tl.where(is_nan, 0, token))
    tl.store(found + rows + row, tl.where(is_nan, float("nan"), value).to(tl.int32, bitcast=True))


@triton.jit
def _add_rms_norm(
    residual: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    hidden: tl.tensor,
    residual_stride: tl.tensor,
    update_stride: tl.tensor,
    normed_stride: tl.tensor,
    HAS_UPDATE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    values = tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + row * update_stride + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + columns, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / hidden + eps)
    scaled = values * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * normed_stride + columns, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _rope_and_write_kv(
    packed: tl.tensor,
    kv: tl.tensor,
    slots: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    packed_stride: tl.tensor,
    rotation_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_part_stride: tl.tensor,
    kv_entry_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_PAIRS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    value = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS) & (value < HEAD_DIM)
    is_query = head < NUM_HEADS
    is_rotated = head < NUM_HEADS + NUM_KV_HEADS
    source = packed + row * packed_stride + head * HEAD_DIM + value
    original = tl.load(source, mask=inside, other=0.0)
    result = original.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(result * result, axis=1)[:, None] / HEAD_DIM + eps)
        weight = tl.load(query_norm + value, mask=value < HEAD_DIM, other=0.0).to(tl.float32)
        key_weight = tl.load(key_norm + value, mask=value < HEAD_DIM, other=0.0).to(tl.float32)
        result = result * scale * tl.where(is_query, weight, key_weight)
    if NUM_PAIRS > 0:
        pair = tl.arange(0, BLOCK // 2)[None, :]
        row_cos = tl.load(cos + row * rotation_stride + pair, mask=pair < NUM_PAIRS, other=1.0)
        row_sin = tl.load(sin + row * rotation_stride + pair, mask=pair < NUM_PAIRS, other=0.0)
        first, second = tl.split(tl.reshape(result, (HEADS, BLOCK // 2, 2)))
        rotated = tl.join(first * row_cos - second * row_sin, first * row_sin + second * row_cos)
        result = tl.reshape(rotated, (HEADS, BLOCK))
    result = tl.where(is_rotated, result.to(packed.dtype.element_ty), original)
    tl.store(source, result, mask=inside & is_query)

    slot = tl.load(slots + row).to(tl.int64)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    part = tl.where(is_rotated, 0, 1)
    target = kv + slot // BLOCK_SIZE * kv_block_stride + slot % BLOCK_SIZE * kv_entry_stride
    target += part * kv_part_stride + kv_head * kv_head_stride + value
    tl.store(target, result.to(kv.dtype.element_ty), mask=inside & (head >= NUM_HEADS) & (slot >= 0))


@triton.jit
def _silu_mul(
    gate_up: tl.tensor,
    product: tl.tensor,
    width: tl.tensor,
    gate_up_stride: tl.tensor,
    product_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + width + columns, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(product + row * product_stride + columns, result.to(product.dtype.element_ty), mask=inside)
