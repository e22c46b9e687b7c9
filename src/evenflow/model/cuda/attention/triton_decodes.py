"""Attention of decodes over paged KV memory, in Triton: one program reads a context or a part of it, in one loop.

A context is divided at positions that depend on its length alone, and its parts are merged in order, in the same
program or by another kernel. So a decode's bits do not depend on the other decodes.
Import this module only where Triton is installed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.splits import ITEM_FIELDS, Splitting, decode_tiles, decode_units, schedule
from evenflow.model.cuda.attention.triton_parts import Parts, merge, merged, send, store_part
from evenflow.model.cuda.limits import limits_of

LOG2_E = 1.4426950408889634
LARGE_SHARED_MEMORY = 165 << 10  # bytes per program, on data-centre GPUs from Hopper on
_TILE_BYTES = 32 << 10  # of keys; half of it with small shared memory
_MIN_PART = 128  # positions
_PROGRAMS_PER_PROCESSOR = 2


class _Sizes(NamedTuple):
    rows: int  # query heads of a KV head, padded for matrix products
    width: int  # positions per iteration
    num_warps: int
    num_stages: int


class _Launch(NamedTuple):
    items: Tensor
    merges: Tensor
    block_tables: Tensor


class DecodeAttention:
    """Attention of decodes, planned once a step and run in each layer. `workspace`: for parts, float32."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, workspace: Tensor) -> None:
        self._config, self._device = config, device
        self._group = config.num_heads // config.num_kv_heads
        self._head_block = max(16, triton.next_power_of_2(config.head_dim))
        limits = limits_of(device)
        self._num_programs = max(1, limits.num_processors * _PROGRAMS_PER_PROCESSOR // config.num_kv_heads)
        self._sizes = _sizes(self._group, self._head_block * dtype.itemsize, limits.shared_memory)
        sizes = {"num_kv_heads": config.num_kv_heads, "group": self._group, "width": self._head_block}
        self._parts = Parts.of(workspace, used_rows=self._group, **sizes)
        self._graph_tables: dict[int, Tensor] = {}
        self._launch: _Launch | None = None

    def plan(self, layout: StepLayout, block_tables: Tensor) -> None:
        """Divide the contexts of the step's decodes among programs, and send the plan to the device."""
        self._launch = None
        num_decodes = layout.num_decodes
        if not num_decodes:
            return
        contexts = np.asarray(layout.decode_contexts, dtype=np.int64)
        splitting = Splitting(_MIN_PART, self._num_programs, self._parts.num_slots, unit_is_part=True)
        planned = schedule(decode_tiles(layout), decode_units(contexts, _MIN_PART), splitting)
        if layout.is_captured:
            planned = planned.padded(num_decodes + splitting.num_programs, num_decodes)
            if num_decodes not in self._graph_tables:
                self._graph_tables[num_decodes] = torch.empty(planned.size, dtype=torch.int32, device=self._device)
        target = self._graph_tables[num_decodes] if layout.is_captured else None
        self._launch = _Launch(*send(planned, self._device, target), block_tables)

    def run(self, layer: int, queries: Tensor, kv: Tensor, output: Tensor) -> None:
        """Compute the step's first rows; writes to the same rows of `output`."""
        if self._launch is None:
            return
        (items, merges, tables), sizes, config = self._launch, self._sizes, self._config
        _attend[(len(items), config.num_kv_heads)](
            queries,
            kv,
            tables,
            items,
            output,
            self._parts.sums,
            self._parts.weights,
            config.attention_scale * LOG2_E,
            *queries.stride()[:2],
            *kv.stride()[:4],
            tables.stride(0),
            *output.stride()[:2],
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=self._head_block,
            BLOCK_SIZE=kv.shape[2],
            ROWS=sizes.rows,
            WIDTH=sizes.width,
            WINDOW=config.layer_windows[layer] or 0,
            FIELDS=ITEM_FIELDS,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )
        merge(merges, self._parts, output)


def _sizes(group: int, key_bytes: int, shared_memory: int) -> _Sizes:
    """Tile sizes: about the same bytes of keys and values for any head dim; two tiles are in flight."""
    is_large = shared_memory >= LARGE_SHARED_MEMORY
    width = max(16, min(_MIN_PART, (_TILE_BYTES if is_large else _TILE_BYTES // 2) // key_bytes))
    return _Sizes(triton.next_power_of_2(max(group, 16)), width, 4 if is_large else 2, 3)


@triton.jit
def _attend(
    queries: tl.tensor,
    kv: tl.tensor,
    block_tables: tl.tensor,
    items: tl.tensor,
    output: tl.tensor,
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    kv_block_stride: tl.tensor,
    kv_part_stride: tl.tensor,
    kv_entry_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    table_stride: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One item and KV head. One loop over all parts, so that loads stay in flight."""
    item = items + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    if tl.load(item + 2) == 0:
        return
    first_row, position = tl.load(item + 1).to(tl.int64), tl.load(item + 3)
    begin, end = tl.load(item + 4), tl.load(item + 5)
    slot, part = tl.load(item + 6), tl.load(item + 7)
    table = block_tables + tl.load(item).to(tl.int64) * table_stride
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    is_row, is_column = row < GROUP, column < HEAD_DIM
    head = kv_head * GROUP + row
    query_row = first_row * query_stride + head * query_head_stride
    inside = is_row[:, None] & is_column[None, :]
    query = tl.load(queries + query_row[:, None] + column[None, :], mask=inside, other=0.0)
    keys = kv + kv_head * kv_head_stride
    part_row = (slot * tl.num_programs(1) + kv_head) * GROUP + row
    no_largest = tl.full((ROWS,), float("-inf"), tl.float32)
    no_weight = tl.zeros((ROWS,), tl.float32)
    no_total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    largest, weight, total = no_largest, no_weight, no_total
    all_largest, all_weight, all_total = no_largest, no_weight, no_total
    if WINDOW > 0:
        visible = tl.minimum(end, tl.maximum(begin, (position + 1 - WINDOW) // WIDTH * WIDTH))
        if slot >= 0:
            for _ in range(begin, visible // part * part if visible < end else end, part):
                store_part(part_sums, part_weights, part_row, is_row, no_largest, no_weight, no_total)
                part_row += tl.num_programs(1) * GROUP
        begin = visible
    for first in range(begin, end, WIDTH):
        entry = first + tl.arange(0, WIDTH)
        is_seen = entry < end
        block = tl.load(table + entry // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        source = keys + block * kv_block_stride + entry % BLOCK_SIZE * kv_entry_stride
        # Unwritten memory may hold NaN, which a weight of zero does not cancel.
        key = tl.load(source[None, :] + column[:, None], mask=is_seen[None, :] & is_column[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        if WINDOW > 0:
            is_seen = is_seen & (position - entry < WINDOW)
        score = tl.where(is_seen[None, :], score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale)
        weights = tl.exp2(tl.fma(score, scale, -new_largest[:, None]))
        rescale = tl.exp2(largest - new_largest)
        weight = tl.fma(weight, rescale, tl.sum(weights, axis=1))
        value_mask = (entry < end)[:, None] & is_column[None, :]
        value = tl.load(source[:, None] + kv_part_stride + column[None, :], mask=value_mask, other=0.0)
        total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
        largest = new_largest
        if ((first + WIDTH) % part == 0) | (first + WIDTH >= end):
            if slot >= 0:
                store_part(part_sums, part_weights, part_row, is_row, largest, weight, total)
                part_row += tl.num_programs(1) * GROUP
            else:
                all_largest, all_weight, all_total = merged(all_largest, all_weight, all_total, largest, weight, total)
            largest, weight, total = no_largest, no_weight, no_total
    if slot < 0:
        output_row = first_row * output_stride + head * output_head_stride
        result = all_total / all_weight[:, None]
        tl.store(output + output_row[:, None] + column[None, :], result.to(output.dtype.element_ty), mask=inside)
