"""Attention of one step on a CPU, over each sequence's contiguous keys and values.

A step is prepared once (views of every layer's memory) and then run layer by layer. Must not know: weights, sampling,
where the memory comes from.

A chunk [start, end) sees all of [0, start) and, of itself, what lies before each row. The first part needs no mask, so
that the query heads sharing a KV head can be folded into rows; the second is the square causal case. The two are
joined by their log-sum-exp: 10-40% faster than one call with a mask, which computes what it then hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WINDOW_BLOCK = 128  # query rows that share one mask and one range of keys under a sliding window


class Span(NamedTuple):
    """Rows of a step that are positions [start, start + length) of one sequence."""

    kv: Tensor  # [layers, 2, KV heads, capacity, head_dim]
    start: int
    length: int


class StepAttention:
    """Writes the new keys and values of all spans and attends over them, layer by layer."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span]) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._lengths = [span.length for span in spans]
        self._num_rows = sum(self._lengths)
        self._sequences = [_SpanAttention(config, span) for span in spans]
        self._attended = torch.empty(self._num_rows, config.num_heads, config.head_dim)
        self._outputs = torch.split_with_sizes(self._attended, self._lengths)
        self._flat = self._attended.view(self._num_rows, -1)

    def __call__(self, layer: int, packed: Tensor) -> Tensor:
        """Rows of [queries, keys, values] in, attended rows out; the memory returned is reused by the next layer."""
        heads = packed.view(self._num_rows, -1, self._head_dim)
        queries = torch.split_with_sizes(heads[:, : self._num_heads], self._lengths)
        keys_values = heads[:, self._num_heads :].view(self._num_rows, 2, self._num_kv_heads, -1)
        new_kv = torch.split_with_sizes(keys_values, self._lengths)
        for sequence, query, kv, output in zip(self._sequences, queries, new_kv, self._outputs, strict=True):
            sequence.run(layer, query, kv, output)
        return self._flat


class _SpanAttention:
    def __init__(self, config: ModelConfig, span: Span) -> None:
        self._start, self._length = span.start, span.length
        self._end = span.start + span.length
        self._group = config.num_heads // config.num_kv_heads
        self._scale = config.attention_scale
        self._windows = [None if window is None or window >= self._end else window for window in config.layer_windows]
        self._new_kv = span.kv[:, :, :, span.start : self._end].permute(0, 3, 1, 2, 4).unbind(0)
        known = span.kv[:, :, None, :, : self._end]
        self._keys, self._values = known[:, 0].unbind(0), known[:, 1].unbind(0)

    def run(self, layer: int, query: Tensor, new_kv: Tensor, output: Tensor) -> None:
        """query, output: [rows, heads, head_dim]; new_kv: [rows, 2, KV heads, head_dim]."""
        self._new_kv[layer].copy_(new_kv)
        window, keys, values = self._windows[layer], self._keys[layer], self._values[layer]
        if self._length == 1:
            self._decode(window, query, keys, values, output)
        elif window is not None:
            self._windowed(window, query, keys, values, output)
        else:
            self._chunk(query, keys, values, output)

    def _decode(self, window: int | None, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        if window is not None:
            keys, values = keys[:, :, -window:], values[:, :, -window:]
        folded = keys.shape[0], keys.shape[1], self._group, keys.shape[3]
        attended, _ = _flash(query.view(folded), keys, values, scale=self._scale)
        output.view(folded).copy_(attended)

    def _chunk(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        start, by_head = self._start, query.transpose(0, 1).unsqueeze(0)
        own, own_weight = _flash(by_head, keys[:, :, start:], values[:, :, start:], is_causal=True, scale=self._scale)
        if start == 0:
            output.copy_(own[0].transpose(0, 1))
            return
        folded = query.transpose(0, 1).reshape(1, keys.shape[1], -1, query.shape[2])
        past, past_weight = _flash(folded, keys[:, :, :start], values[:, :, :start], scale=self._scale)
        share = torch.sigmoid(past_weight.reshape(own_weight.shape) - own_weight)
        torch.lerp(own, past.reshape(own.shape), share.unsqueeze(-1), out=output.transpose(0, 1).unsqueeze(0))

    def _windowed(self, window: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """Blocks of queries, so that keys before every row's window are not read."""
        for first in range(0, self._length, _WINDOW_BLOCK):
            last = min(first + _WINDOW_BLOCK, self._length)
            first_key, last_key = max(0, self._start + first + 1 - window), self._start + last
            mask = _window_mask(self._start + first, last - first, first_key, last_key, window)
            by_head = query[first:last].transpose(0, 1).unsqueeze(0)
            block_keys, block_values = keys[:, :, first_key:last_key], values[:, :, first_key:last_key]
            attended, _ = _flash(by_head, block_keys, block_values, attn_mask=mask, scale=self._scale)
            output[first:last].copy_(attended[0].transpose(0, 1))


def _window_mask(first_row: int, rows: int, first_key: int, last_key: int, window: int) -> Tensor:
    distance = torch.arange(first_row, first_row + rows).unsqueeze(1) - torch.arange(first_key, last_key)
    return torch.zeros(distance.shape).masked_fill_((distance < 0) | (distance >= window), -math.inf)
