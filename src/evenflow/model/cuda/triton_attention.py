"""Attention over paged KV memory in Triton: one kernel for decodes and chunks, one that merges what was split.

A tile is a run of tokens of one sequence, with all query heads of a KV head; a decode is a tile of one token. Import
this module only where Triton is installed.

In deterministic mode a token's result is bitwise the same for any chunks, batch and prefix hits: its KV is always cut
at the same absolute positions, each part is reduced alike, and parts are merged in the order of their positions, be it
in registers or by the merging kernel. What happens to one row of a tile does not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from evenflow.core.plan import AttentionWaves
from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention import StepLayout
from evenflow.model.cuda.limits import limits_of
from evenflow.model.cuda.splits import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    Schedule,
    Splitting,
    chunk_tiles,
    decode_tiles,
    schedule,
)

_DETERMINISTIC_SPLIT = 512  # positions reduced in one go: a multiple of every kernel's width
_WORKSPACE_BYTES = 64 << 20  # for the parts of split tiles
# The deterministic mode has more of them: a part of the device's memory. 32-bit offsets reach all of it.
_DETERMINISTIC_SHARE, _MOST_WORKSPACE_BYTES = 1 / 256, 512 << 20
_LARGE_SHARED_MEMORY = 165 << 10  # bytes for one program, as on data-centre GPUs from Hopper on
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class _Kernel:
    """Sizes for decodes or for chunks."""

    rows: int  # (token, query head) pairs of a tile
    width: int  # positions of KV at a time
    num_warps: int
    num_stages: int  # half of them for loads of the block table: 5 keep two tiles of KV on their way, 3 keep one
    used_rows: int
    programs_per_sm: int
    least_split: int


def _kernels_for(
    head_dim: int, group: int, dtype: torch.dtype, deterministic: bool, shared_memory: int
) -> tuple[_Kernel, _Kernel]:
    """For decodes and for chunks. Deterministic ones reduce a row by the same instructions in the same order."""
    least = triton.next_power_of_2(max(group, 16))
    is_large = shared_memory >= _LARGE_SHARED_MEMORY
    if dtype == torch.float32:
        rows, width, num_warps, num_stages = 16, 32, 4, 2
    elif head_dim > 128:
        rows, width, num_warps, num_stages = 64 if deterministic or not is_large else 128, 32, 8, 5 if is_large else 3
    else:
        rows, width, num_warps, num_stages = 128, 64, 8, 5 if is_large else 3
    rows = max(least, rows)
    decode_rows = max(least, min(rows, 64)) if deterministic else least
    decode_warps = num_warps if decode_rows == rows else 4
    decode = _Kernel(decode_rows, width, decode_warps, num_stages, group, programs_per_sm=4, least_split=128)
    return decode, _Kernel(rows, width, num_warps, num_stages, rows, programs_per_sm=1, least_split=512)


@dataclass(frozen=True, slots=True)
class _Launch:
    """Either the decodes or the chunks of a step, ready to run in each layer."""

    kernel: _Kernel
    items: Tensor
    merges: Tensor
    block_tables: Tensor
    parts: tuple[Tensor, Tensor]  # the workspace: sums of values, and pairs of largest score and sum of weights


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
        self._num_sms = limits.num_processors
        self._decode, self._chunk = _kernels_for(
            config.head_dim, self._group, dtype, deterministic, limits.shared_memory
        )
        num_bytes = _WORKSPACE_BYTES
        if deterministic:
            num_bytes = max(num_bytes, min(int(_DETERMINISTIC_SHARE * limits.memory), _MOST_WORKSPACE_BYTES))
        self._workspace = torch.empty(num_bytes // 4, dtype=torch.float32, device=device)
        self._graph_tables: dict[int, Tensor] = {}
        self._launches: list[_Launch] = []

    def plan(self, layout: StepLayout) -> None:
        """Cut the step into tiles and splits, and send them to the device."""
        self._launches = []
        for kernel, tiles in (
            (self._decode, decode_tiles(layout)),
            (self._chunk, chunk_tiles(layout, self._chunk.rows // self._group)),
        ):
            if len(tiles):
                splitting = self._splitting(kernel)
                planned = schedule(tiles, splitting)
                if layout.is_captured:
                    planned = planned.padded(len(tiles) + splitting.num_programs, len(tiles))
                items, merges = self._send(planned, len(tiles) if layout.is_captured else None)
                parts = self._parts(kernel, splitting.num_slots)
                self._launches.append(_Launch(kernel, items, merges, layout.block_tables, parts))

    def run(self, layer: int, queries: Tensor, kv: Tensor, out: Tensor | None = None) -> Tensor:
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device) if out is None else out
        for launch in self._launches:
            self._attend(launch, layer, queries, kv, output)
            if len(launch.merges):
                self._merge(launch, output)
        return output

    def repeated(self, queries: Tensor, kv: Tensor, out: Tensor) -> None:
        """There is none."""

    def _splitting(self, kernel: _Kernel) -> Splitting:
        num_kv_heads = self._config.num_kv_heads
        return Splitting(
            unit=_DETERMINISTIC_SPLIT if self._deterministic else kernel.width,
            least=kernel.least_split,
            num_programs=max(1, self._num_sms * kernel.programs_per_sm // num_kv_heads),
            num_slots=self._workspace.numel() // (num_kv_heads * kernel.used_rows * (self._head_block + 2)),
            unit_is_part=self._deterministic,
        )

    def _send(self, planned: Schedule, graph: int | None) -> tuple[Tensor, Tensor]:
        """To new memory, or to that which the graph for this number of decodes reads.

        The stream orders the copy after the step before. Pinned memory is reused only once it has been copied.
        """
        packed = torch.from_numpy(np.concatenate((planned.items.ravel(), planned.merges.ravel())))
        if self._device.type == "cuda":
            packed = packed.pin_memory()
        if graph is None:
            table = packed.to(self._device, non_blocking=True)
        else:
            if graph not in self._graph_tables:
                self._graph_tables[graph] = torch.empty_like(packed, device=self._device)
            table = self._graph_tables[graph].copy_(packed, non_blocking=True)
        items, merges = torch.split_with_sizes(table, [planned.items.size, planned.merges.size])
        return items.view(-1, ITEM_FIELDS), merges.view(-1, MERGE_FIELDS)

    def _parts(self, kernel: _Kernel, num_slots: int) -> tuple[Tensor, Tensor]:
        num_rows = num_slots * self._config.num_kv_heads * kernel.used_rows
        return self._workspace[: num_rows * self._head_block], self._workspace[num_rows * self._head_block :]

    def _attend(self, launch: _Launch, layer: int, queries: Tensor, kv: Tensor, output: Tensor) -> None:
        kernel, config = launch.kernel, self._config
        _attend[(len(launch.items), config.num_kv_heads)](
            queries,
            kv,
            launch.block_tables,
            launch.items,
            output,
            *launch.parts,
            config.attention_scale * _LOG2_E,
            *queries.stride()[:2],
            *kv.stride()[:4],
            launch.block_tables.stride(0),
            *output.stride()[:2],
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=self._head_block,
            BLOCK_SIZE=kv.shape[2],
            ROWS=kernel.rows,
            USED_ROWS=kernel.used_rows,
            WIDTH=kernel.width,
            WINDOW=config.layer_windows[layer] or 0,
            PART=_DETERMINISTIC_SPLIT if self._deterministic else 0,
            FIELDS=ITEM_FIELDS,
            num_warps=kernel.num_warps,
            num_stages=kernel.num_stages,
        )

    def _merge(self, launch: _Launch, output: Tensor) -> None:
        kernel, config = launch.kernel, self._config
        _merge_parts[(len(launch.merges), config.num_kv_heads, kernel.used_rows)](
            launch.merges,
            output,
            *launch.parts,
            *output.stride()[:2],
            GROUP=self._group,
            HEAD_DIM=config.head_dim,
            BLOCK_D=self._head_block,
            USED_ROWS=kernel.used_rows,
            FIELDS=MERGE_FIELDS,
            num_warps=1,
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
    USED_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    PART: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One item and KV head. PART: positions reduced apart and merged in order, 0 for all at once."""
    item = items + tl.program_id(0) * FIELDS
    kv_head = tl.program_id(1)
    first_row, num_tokens, first_position = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, slot = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)
    if num_tokens == 0:
        return
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
    part_row = (slot * tl.num_programs(1) + kv_head) * USED_ROWS + row
    if PART == 0:
        largest, weight, total = _reduce(
            query, position, memory, table, begin_visible, end, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW
        )
        if slot >= 0:
            _store_part(part_sums, part_weights, part_row, row < USED_ROWS, largest, weight, total)
    else:
        largest, weight, total = state
        for part in range(begin, end, PART):
            first, last = tl.maximum(part, begin_visible), tl.minimum(part + PART, end)
            part_largest, part_weight, part_total = _reduce(
                query, position, memory, table, first, last, scale, state, HEAD_DIM, BLOCK_SIZE, WIDTH, WINDOW
            )
            if slot >= 0:
                _store_part(part_sums, part_weights, part_row, row < USED_ROWS, part_largest, part_weight, part_total)
                part_row += tl.num_programs(1) * USED_ROWS
            else:
                largest, weight, total = _merged(largest, weight, total, part_largest, part_weight, part_total)
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
    else:  # every row sees all positions before that of the first row: masks take time
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
    # Every product that is added has its fma written out, so that all callers compile to the same arithmetic.
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


@triton.jit
def _merged(
    largest: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    part_largest: tl.tensor,
    part_weight: tl.tensor,
    part_total: tl.tensor,
) -> tl.tuple:
    new_largest = tl.maximum(largest, part_largest)
    reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    rescale, part_rescale = tl.exp2(largest - reference), tl.exp2(part_largest - reference)
    weight = tl.fma(part_weight, part_rescale, weight * rescale)
    total = tl.fma(part_total, tl.broadcast_to(part_rescale[:, None], part_total.shape), total * rescale[:, None])
    return new_largest, weight, total


@triton.jit
def _store_part(
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
def _merge_parts(
    merges: tl.tensor,
    output: tl.tensor,
    part_sums: tl.tensor,
    part_weights: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USED_ROWS: tl.constexpr,
    FIELDS: tl.constexpr,
) -> None:
    """One row of a shared tile: its parts in the order of their positions."""
    merge = merges + tl.program_id(0) * FIELDS
    kv_head, row = tl.program_id(1), tl.program_id(2)
    first_row, num_tokens = tl.load(merge), tl.load(merge + 1)
    first_slot, num_parts = tl.load(merge + 2), tl.load(merge + 3)
    if row >= num_tokens * GROUP:
        return
    column = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    largest = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, BLOCK_D), tl.float32)
    for part in range(first_slot, first_slot + num_parts):
        part_row = (part * tl.num_programs(1) + kv_head) * USED_ROWS + row + one
        part_largest = tl.load(part_weights + 2 * part_row)
        part_weight = tl.load(part_weights + 2 * part_row + 1)
        part_total = tl.load(part_sums + part_row[:, None] * BLOCK_D + column[None, :])
        largest, weight, total = _merged(largest, weight, total, part_largest, part_weight, part_total)
    result = total / tl.where(weight == 0.0, 1.0, weight)[:, None]
    head = kv_head * GROUP + row % GROUP
    target = output + (first_row + row // GROUP).to(tl.int64) * output_stride + head * output_head_stride
    target = target + one[:, None] + column[None, :]
    tl.store(target, result.to(output.dtype.element_ty), mask=(column < HEAD_DIM)[None, :])
