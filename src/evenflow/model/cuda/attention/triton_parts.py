"""Triton functions that reduce parts of a context separately, and merge them in order of positions.

A part is the largest score, the sum of weights relative to it, and the weighted sum of values. Merging in registers
uses the same arithmetic, so a result does not depend on the kernel that computed its parts.
Import this module only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from evenflow.model.cuda.attention.splits import ITEM_FIELDS, MERGE_FIELDS, Schedule


@dataclass(frozen=True, slots=True)
class Parts:
    """Memory for `num_slots` parts of tiles, each with `used_rows` rows of `width` values for each KV head."""

    sums: Tensor
    weights: Tensor  # pairs of largest score and sum of weights
    num_slots: int
    num_kv_heads: int
    group: int  # query heads of a KV head
    used_rows: int
    width: int

    @classmethod
    def of(cls, workspace: Tensor, *, num_kv_heads: int, group: int, used_rows: int, width: int) -> Parts:
        """Use the whole workspace, of float32."""
        slot_rows = num_kv_heads * used_rows
        num_slots = workspace.numel() // (slot_rows * (width + 2))
        end = num_slots * slot_rows * width
        return cls(workspace[:end], workspace[end:], num_slots, num_kv_heads, group, used_rows, width)


def send(planned: Schedule, device: torch.device, target: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Send items and merges to new device memory, or to `target`, which a graph reads.

    The stream orders the copy after the step before. Pinned memory is reused only after the copy.
    """
    packed = torch.from_numpy(np.concatenate((planned.items.ravel(), planned.merges.ravel())))
    if device.type == "cuda":
        packed = packed.pin_memory()
    table = packed.to(device, non_blocking=True) if target is None else target.copy_(packed, non_blocking=True)
    items, merges = torch.split_with_sizes(table, [planned.items.size, planned.merges.size])
    return items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS)


def merge(merges: Tensor, parts: Parts, output: Tensor) -> None:
    """Write the rows of the tiles in `merges`, if any, to `output` [rows, heads, head dim]."""
    if not len(merges):
        return
    _merge[(len(merges), parts.num_kv_heads, triton.cdiv(parts.used_rows, parts.group))](
        merges,
        output,
        parts.sums,
        parts.weights,
        *output.stride()[:2],
        GROUP=parts.group,
        GROUP_BLOCK=triton.next_power_of_2(parts.group),
        HEAD_DIM=output.shape[2],
        BLOCK_D=parts.width,
        USED_ROWS=parts.used_rows,
        FIELDS=MERGE_FIELDS,
        num_warps=1,
    )


@triton.jit
def merged(
    largest: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    part_largest: tl.tensor,
    part_weight: tl.tensor,
    part_total: tl.tensor,
) -> tl.tuple:
    """Merge two parts. Explicit fma, so that all callers compute the same bits."""
    new_largest = tl.maximum(largest, part_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    rescale, part_rescale = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    weight = tl.fma(part_weight, part_rescale, weight * rescale)
    total = tl.fma(part_total, tl.broadcast_to(part_rescale[:, None], part_total.shape), total * rescale[:, None])
    return new_largest, weight, total


@triton.jit
def store_part(
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    part_row: tl.tensor,
    is_used: tl.tensor,
    largest: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
) -> None:
    column = tl.arange(0, total.shape[1])
    tl.store(part_sums + part_row[:, None] * total.shape[1] + column[None, :], total, mask=is_used[:, None])
    tl.store(part_weights + 2 * part_row, largest, mask=is_used)
    tl.store(part_weights + 2 * part_row + 1, weight, mask=is_used)


@triton.jit
def _merge(
    merges: tl.tensor,
    output: tl.tensor,
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USED_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """Merge the heads of one token of a shared tile: its parts in order of positions."""
    entry = merges + tl.program_id(0) * FIELDS
    kv_head, token = tl.program_id(1), tl.program_id(2)
    first_row, num_tokens = tl.load(entry), tl.load(entry + 1)
    first_slot, num_parts = tl.load(entry + 2), tl.load(entry + 3)
    if token >= num_tokens:
        return
    column, member = tl.arange(0, BLOCK_D), tl.arange(0, GROUP_BLOCK)
    is_member = member < GROUP
    row = (first_slot * tl.num_programs(1) + kv_head) * USED_ROWS + token * GROUP + member
    distance = tl.num_programs(1) * USED_ROWS  # from a part's row to the next one's
    largest = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((GROUP_BLOCK,), tl.float32)
    total = tl.zeros((GROUP_BLOCK, BLOCK_D), tl.float32)
    for done in range(0, num_parts, 4):  # four loads at a time; missing parts add nothing
        left = num_parts - done
        first = _load_part(part_sums, part_weights, row, is_member, BLOCK_D)
        second = _load_part(part_sums, part_weights, row + distance, is_member & (left > 1), BLOCK_D)
        third = _load_part(part_sums, part_weights, row + 2 * distance, is_member & (left > 2), BLOCK_D)
        fourth = _load_part(part_sums, part_weights, row + 3 * distance, is_member & (left > 3), BLOCK_D)
        largest, weight, total = merged(largest, weight, total, first[0], first[1], first[2])
        largest, weight, total = merged(largest, weight, total, second[0], second[1], second[2])
        largest, weight, total = merged(largest, weight, total, third[0], third[1], third[2])
        largest, weight, total = merged(largest, weight, total, fourth[0], fourth[1], fourth[2])
        row += 4 * distance
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    target = output + (first_row + token).to(tl.int64) * output_stride + (kv_head * GROUP + member) * output_head_stride
    inside = is_member[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(target[:, None] + column[None, :], result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _load_part(
    part_sums: tl.tensor, part_weights: tl.tensor, row: tl.tensor, is_there: tl.tensor, BLOCK_D: tl.constexpr
) -> tl.tuple:
    column = tl.arange(0, BLOCK_D)
    largest = tl.load(part_weights + 2 * row, mask=is_there, other=float("-inf"))
    weight = tl.load(part_weights + 2 * row + 1, mask=is_there, other=0.0)
    total = tl.load(part_sums + row[:, None] * BLOCK_D + column[None, :], mask=is_there[:, None], other=0.0)
    return largest, weight, total
