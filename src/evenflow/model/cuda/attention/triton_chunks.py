"""Attention over paged KV memory in Triton alone: a kernel for chunks, beside the one for decodes.

A tile is a run of tokens of one sequence, with all query heads of a KV head. Import this module only where Triton is
installed.

In deterministic mode a prompt token's result is bitwise the same for any chunks, batch and prefix hits: its KV is
divided at the same absolute positions, each part is reduced alike, and parts are merged in order, in registers or by
the merging kernel. The rows of a tile do not affect each other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from evenflow.core.plan import AttentionWaves
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import StepLayout
from evenflow.model.cuda.attention.splits import ITEM_FIELDS, Splitting, chunk_tiles, schedule
from evenflow.model.cuda.attention.triton_decodes import LARGE_SHARED_MEMORY, LOG2_E, DecodeAttention
from evenflow.model.cuda.attention.triton_parts import Parts, merge, merged, send, store_part
from evenflow.model.cuda.limits import limits_of

_DETERMINISTIC_SPLIT = 512  # positions per part: a multiple of the kernel's width
_MIN_SPLIT = 512  # positions
_WORKSPACE_BYTES = 64 << 20  # for the parts of split tiles
# Deterministic mode has more parts, in a share of the device's memory within the range of 32-bit offsets.
_DETERMINISTIC_SHARE, _MAX_WORKSPACE_BYTES = 1 / 256, 512 << 20


class _Sizes(NamedTuple):
    rows: int  # (token, query head) pairs of a tile
    width: int  # positions of KV per iteration
    num_warps: int
    num_stages: int  # half of them for the block table: 5 keep two KV tiles in flight, 3 keep one


def _sizes(head_dim: int, group: int, dtype: torch.dtype, deterministic: bool, shared_memory: int) -> _Sizes:
    is_large = shared_memory >= LARGE_SHARED_MEMORY
    if dtype == torch.float32:
        rows, width, num_warps, num_stages = 16, 32, 4, 2
    elif head_dim > 128:
        rows, width, num_warps, num_stages = 64 if deterministic or not is_large else 128, 32, 8, 5 if is_large else 3
    else:
        rows, width, num_warps, num_stages = 128, 64, 8, 5 if is_large else 3
    return _Sizes(max(triton.next_power_of_2(group), rows), width, num_warps, num_stages)


class _Chunks(NamedTuple):
    """The chunks of a step, ready to run in each layer."""

    items: Tensor
    merges: Tensor
    block_tables: Tensor


class TritonAttention:
    """Implements `AttentionBackend`."""

    waves: AttentionWaves | None = None  # long contexts are split

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, deterministic: bool = False
    ) -> None:
        self.name = "Triton, deterministic" if deterministic else "Triton"
        self._config, self._device, self._deterministic = config, device, deterministic
        self._group = config.num_heads // config.num_kv_heads
        self._head_block = max(16, triton.next_power_of_2(config.head_dim))
        limits = limits_of(device)
        self._num_programs = max(1, limits.num_processors // config.num_kv_heads)
        self._sizes = _sizes(config.head_dim, self._group, dtype, deterministic, limits.shared_memory)
        num_bytes = _WORKSPACE_BYTES
        if deterministic:
            num_bytes = max(num_bytes, min(int(_DETERMINISTIC_SHARE * limits.memory), _MAX_WORKSPACE_BYTES))
        # Decodes share the workspace: their parts are merged before chunks run.
        workspace = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        sizes = {"num_kv_heads": config.num_kv_heads, "group": self._group, "width": self._head_block}
        self._parts = Parts.of(workspace, used_rows=self._sizes.rows, **sizes)
        self._decodes = DecodeAttention(config, dtype, device, workspace)
        self._chunks: _Chunks | None = None

    def plan(self, layout: StepLayout) -> None:
        """Cut the step into tiles and splits, and send them to the device."""
        self._decodes.plan(layout, layout.block_tables)
        self._chunks = None
        tiles = chunk_tiles(layout, self._sizes.rows // self._group)
        if len(tiles):
            unit = _DETERMINISTIC_SPLIT if self._deterministic else self._sizes.width
            splitting = Splitting(_MIN_SPLIT, self._num_programs, self._parts.num_slots, self._deterministic)
            self._chunks = _Chunks(*send(schedule(tiles, unit, splitting), self._device), layout.block_tables)

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
        self._decodes.run(layer, queries, kv, output)
        if self._chunks is not None:
            self._attend(self._chunks, layer, queries, kv, output)
            merge(self._chunks.merges, self._parts, output)
        return output

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> None:
        """Not supported."""

    def _attend(self, chunks: _Chunks, layer: int, queries: Tensor, kv: Tensor, output: Tensor) -> None:
        sizes, config = self._sizes, self._config
        _attend[(len(chunks.items), config.num_kv_heads)](
            queries,
            kv,
            chunks.block_tables,
            chunks.items,
            output,
            self._parts.sums,
            self._parts.weights,
            config.attention_scale * LOG2_E,
            *queries.stride()[:2],
            *kv.stride()[:4],
            chunks.block_tables.stride(0),
            *output.stride()[:2],
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=self._head_block,
            BLOCK_SIZE=kv.shape[2],
            ROWS=sizes.rows,
            WIDTH=sizes.width,
            WINDOW=config.layer_windows[layer] or 0,
            PART=_DETERMINISTIC_SPLIT if self._deterministic else 0,
            FIELDS=ITEM_FIELDS,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
        )


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
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One item and KV head. PART: positions reduced separately and merged in order; 0: all at once."""
    item = items + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_row, num_tokens, first_position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    table = block_tables + tl.load(item).to(tl.int64) * table_stride
    row = tl.arange(0, ROWS)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    position = first_position + token
    column = tl.arange(0, BLOCK_D)
    inside = (token < num_tokens)[:, None] & (column < HEAD_DIM)[None, :]
    query_row = (first_row + token).to(tl.int64) * query_stride + head * query_head_stride
    query = tl.load(queries + query_row[:, None] + column[None, :], mask=inside, other=0.0)

    if WINDOW > 0:
        begin_visible = tl.maximum(begin, (first_position + 1 - WINDOW) // WIDTH * WIDTH)
    else:
        begin_visible = begin
    memory = (kv + kv_head * kv_head_stride, kv_block_stride, kv_part_stride, kv_entry_stride)
    state = (
        tl.full((ROWS,), float("-inf"), tl.float32),
        tl.zeros((ROWS,), tl.float32),
        tl.zeros((ROWS, BLOCK_D), tl.float32),
    )
    part_row = (slot * tl.num_programs(1) + kv_head) * ROWS + row
    if PART == 0:
        largest, weight, total = _reduce(
            query, position, memory, table, begin_visible, end, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW
        )
        if slot >= 0:
            store_part(part_sums, part_weights, part_row, row >= 0, largest, weight, total)
    else:
        largest, weight, total = state
        for part in range(begin, end, PART):
            first, last = tl.maximum(part, begin_visible), tl.minimum(part + PART, end)
            part_largest, part_weight, part_total = _reduce(
                query, position, memory, table, first, last, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW
            )
            if slot >= 0:
                store_part(part_sums, part_weights, part_row, row >= 0, part_largest, part_weight, part_total)
                part_row += tl.num_programs(1) * ROWS
            else:
                largest, weight, total = merged(largest, weight, total, part_largest, part_weight, part_total)
    if slot < 0:
        output_row = (first_row + token).to(tl.int64) * output_stride + head * output_head_stride
        result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
        target = output + output_row[:, None] + column[None, :]
        tl.store(target, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _reduce(
    query: tl.tensor,
    position: tl.tensor,
    memory: tl.tuple,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
) -> tl.tuple:
    """Softmax over positions [begin, end) with a running maximum: (largest score, sum of weights, sum of values)."""
    if WINDOW > 0:
        masked_from = begin
    else:  # every row sees all positions before the first row: no mask needed
        masked_from = tl.maximum(begin, tl.minimum(end, tl.min(position)) // WIDTH * WIDTH)
        state = _reduce_range(
            query, position, memory, table, begin, masked_from, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW, False
        )
    return _reduce_range(
        query, position, memory, table, masked_from, end, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW, True
    )


@triton.jit
def _reduce_range(
    query: tl.tensor,
    position: tl.tensor,
    memory: tl.tuple,
    table: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    state: tl.tuple,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    # Explicit fma, so that all callers compile to the same arithmetic.
    keys, block_stride, part_stride, entry_stride = memory
    largest, weight, total = state
    column = tl.arange(0, query.shape[1])
    is_column = column < HEAD_DIM
    for first in range(begin, end, WIDTH):
        entry = first + tl.arange(0, WIDTH)
        is_written = entry < end if MASKED else entry >= 0
        block = tl.load(table + entry // BLOCK_SIZE, mask=is_written, other=0).to(tl.int64)
        source = keys + block * block_stride + entry % BLOCK_SIZE * entry_stride
        key = tl.load(source[None, :] + column[:, None], mask=is_written[None, :] & is_column[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee")
        if MASKED:
            distance = position[:, None] - entry[None, :]
            visible = (distance >= 0) & is_written[None, :]
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            score = tl.where(visible, score, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(score, axis=1) * scale)
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(tl.fma(score, scale, -reference[:, None]))
        rescale = tl.exp2(largest - reference)
        weight = tl.fma(weight, rescale, tl.sum(weights, axis=1))
        # Unwritten memory may hold NaN, which a weight of zero does not cancel.
        value_mask = is_written[:, None] & is_column[None, :]
        value = tl.load(source[:, None] + part_stride + column[None, :], mask=value_mask, other=0.0)
        total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
        largest = new_largest
    return largest, weight, total
