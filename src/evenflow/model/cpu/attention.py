"""Attention of one step on a CPU, over each sequence's contiguous keys and values.

A step is prepared once, then run layer by layer by the native kernel, or by torch if there is none.
`benchmarks/cpu_ops.py` measures the choices made here.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cpu.native_attention import NativeStepAttention, Span, has_native_attention

logger = logging.getLogger("evenflow")

# (layer, rows of [queries, keys, values]) -> attended rows. Writes the new keys and values first. The next layer reuses
# the memory of the result.
StepAttention = Callable[[int, Tensor], Tensor]

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WINDOW_BLOCK = 128  # query rows that share one mask and one range of keys under a sliding window


def attention_for(config: ModelConfig) -> Callable[[Sequence[Span]], StepAttention]:
    """Prepares the attention of this model's steps."""
    return functools.partial(NativeStepAttention if runs_natively(config) else TorchStepAttention, config)


def runs_natively(config: ModelConfig) -> bool:
    """Whether the native kernel is available, supports this model, and gives torch's results."""
    return has_native_attention(config.head_dim) and _native_agrees(config)


def _native_agrees(config: ModelConfig) -> bool:
    """Compare both on one small step of a decode and a chunk, to catch a miscompiled kernel."""
    config = replace(config, num_layers=1, layer_windows=config.layer_windows[:1], layer_uses_rope=(True,))
    generator = torch.Generator().manual_seed(0)
    num_heads = config.num_heads + 2 * config.num_kv_heads
    memory = torch.randn(1, 2, config.num_kv_heads, 96, config.head_dim, generator=generator)
    packed = torch.randn(33, num_heads * config.head_dim, generator=generator)
    found = []
    for prepare in (NativeStepAttention, TorchStepAttention):
        spans = [Span(memory.clone(), 70, 1), Span(memory.clone(), 20, 32)]
        found.append((prepare(config, spans)(0, packed), spans[0].kv, spans[1].kv))
    agrees = all(torch.allclose(native, other, rtol=0, atol=1e-4) for native, other in zip(*found, strict=True))
    if not agrees:
        logger.warning("Running attention on torch: the native kernel gives different results.")
    return agrees


class TorchStepAttention:
    """Writes the new keys and values of all spans and attends over them, layer by layer."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span]) -> None:
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._lengths = [span.length for span in spans]
        self._num_rows = sum(self._lengths)
        # unbind() gives the views of all layers: slicing them one by one costs more than a decode's attention.
        new_kv = [span.kv[:, :, :, span.start : span.end].permute(0, 3, 1, 2, 4).unbind() for span in spans]
        self._new_kv = list(zip(*new_kv, strict=True))
        self._sequences = [(_Decode if span.length == 1 else _Chunk)(config, span) for span in spans]
        self._attended = torch.empty(self._num_rows, config.num_heads, config.head_dim)
        self._outputs = torch.split_with_sizes(self._attended, self._lengths)

    def __call__(self, layer: int, packed: Tensor) -> Tensor:
        heads = packed.view(self._num_rows, -1, self._head_dim)
        new_kv = heads[:, self._num_heads :].view(self._num_rows, 2, self._num_kv_heads, -1)
        torch._foreach_copy_(self._new_kv[layer], torch.split_with_sizes(new_kv, self._lengths))
        queries = torch.split_with_sizes(heads[:, : self._num_heads], self._lengths)
        for sequence, query, output in zip(self._sequences, queries, self._outputs, strict=True):
            sequence.run(layer, query, output)
        return self._attended.view(self._num_rows, -1)


class _Decode:
    """One row sees everything, or its whole window: no mask, and a KV head's query heads form one matrix."""

    def __init__(self, config: ModelConfig, span: Span) -> None:
        self._scale = config.attention_scale
        self._folded = (config.num_kv_heads, config.num_heads // config.num_kv_heads, config.head_dim)
        self._unused = torch.empty(1, 1, 1)
        views: dict[int | None, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {}
        for window in set(config.layer_windows):
            seen = span.kv[:, :, :, 0 if window is None else max(0, span.end - window) : span.end]
            views[window] = seen[:, 0].transpose(2, 3).unbind(), seen[:, 1].unbind()
        self._keys = [views[window][0][layer] for layer, window in enumerate(config.layer_windows)]
        self._values = [views[window][1][layer] for layer, window in enumerate(config.layer_windows)]

    def run(self, layer: int, query: Tensor, output: Tensor) -> None:
        """query, output: [1, heads, head_dim]."""
        folded = query.view(self._folded)
        scores = torch.baddbmm(self._unused, folded, self._keys[layer], beta=0, alpha=self._scale)
        torch.bmm(scores.softmax(-1), self._values[layer], out=output.view(self._folded))


class _Chunk:
    """Several rows, each of which sees itself and the positions before it.

    Rows of a chunk [start, end) all see [0, start), which needs no mask, so the query heads that share a KV head are
    folded into rows. The chunk itself is the square causal case. Joining the two by their log-sum-exp is 10-40% faster
    than one call with a mask, which computes scores only to hide them.
    """

    def __init__(self, config: ModelConfig, span: Span) -> None:
        self._span = span
        self._scale = config.attention_scale
        self._group = config.num_heads // config.num_kv_heads
        self._grouped = (span.length, config.num_kv_heads, self._group, config.head_dim)
        self._windows = [None if window is None or window >= span.end else window for window in config.layer_windows]
        seen = span.kv[:, :, :, None, : span.end]
        self._keys, self._values = seen[:, 0].unbind(), seen[:, 1].unbind()

    def run(self, layer: int, query: Tensor, output: Tensor) -> None:
        """query, output: [rows, heads, head_dim]."""
        # [KV heads, query heads per KV head, rows, head_dim]; keys and values have 1 in the second dimension.
        query = query.view(self._grouped).permute(1, 2, 0, 3)
        output = output.view(self._grouped).permute(1, 2, 0, 3)
        keys, values, window = self._keys[layer], self._values[layer], self._windows[layer]
        if window is not None:
            self._windowed(window, query, keys, values, output)
        else:
            self._causal(query, keys, values, output)

    def _causal(self, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        start = self._span.start
        own_keys, own_values = self._shared(keys[:, :, start:]), self._shared(values[:, :, start:])
        own, own_weight = _flash(query, own_keys, own_values, is_causal=True, scale=self._scale)
        if start == 0:
            output.copy_(own)
            return
        folded = query.reshape(keys.shape[0], 1, -1, keys.shape[3])
        past, past_weight = _flash(folded, keys[:, :, :start], values[:, :, :start], scale=self._scale)
        share = torch.sigmoid(past_weight.reshape(own_weight.shape) - own_weight)
        torch.lerp(own, past.reshape(own.shape), share.unsqueeze(-1), out=output)

    def _windowed(self, window: int, query: Tensor, keys: Tensor, values: Tensor, output: Tensor) -> None:
        """In blocks of queries, to skip keys that lie before all of a block's windows."""
        start, length = self._span.start, self._span.length
        for first in range(0, length, _WINDOW_BLOCK):
            last = min(first + _WINDOW_BLOCK, length)
            first_key, last_key = max(0, start + first + 1 - window), start + last
            mask = _window_mask(start + first, last - first, first_key, last_key, window)
            block_keys = self._shared(keys[:, :, first_key:last_key])
            block_values = self._shared(values[:, :, first_key:last_key])
            attended, _ = _flash(query[:, :, first:last], block_keys, block_values, attn_mask=mask, scale=self._scale)
            output[:, :, first:last].copy_(attended)

    def _shared(self, keys_or_values: Tensor) -> Tensor:
        """The same memory for each query head: not every torch supports fewer KV heads than query heads."""
        return keys_or_values.expand(-1, self._group, -1, -1)


def _window_mask(first_row: int, rows: int, first_key: int, last_key: int, window: int) -> Tensor:
    distance = torch.arange(first_row, first_row + rows).unsqueeze(1) - torch.arange(first_key, last_key)
    return torch.zeros(distance.shape).masked_fill_((distance < 0) | (distance >= window), -math.inf)
