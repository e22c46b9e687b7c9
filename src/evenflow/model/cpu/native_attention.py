"""Attention of one step on a CPU by the native kernel: all sequences of a layer in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.native.build import library
from evenflow.native.matrix import require

_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256


class Span(NamedTuple):
    """Rows of a step that are positions [start, start + length) of one sequence."""

    kv: Tensor  # [layers, 2, KV heads, capacity, head_dim]
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class _SpanStruct(ctypes.Structure):
    """`Span` of attention.h."""

    _fields_ = (
        ("kv", ctypes.c_void_p),
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("strides", ctypes.c_int64 * 4),
    )


class _Shape(ctypes.Structure):
    """`AttentionShape` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window", "fixed_order")),
        ("scale", ctypes.c_float),
    )


def has_native_attention(head_dim: int) -> bool:
    """Whether the kernel is available and supports heads of this size."""
    return head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _MAX_HEAD_DIM and library() is not None


def native_spans(config: ModelConfig, spans: Sequence[Span]) -> ctypes.Array[_SpanStruct]:
    """The spans as the kernels read them. The caller keeps their memory alive."""
    if not spans:
        raise ValueError("Got no spans but expected at least one.")
    for kv, start, length in spans:
        capacity = kv.shape[-2]
        shape = config.num_layers, 2, config.num_kv_heads, capacity, config.head_dim
        if kv.shape != shape or kv.dtype != torch.float32 or kv.stride(-1) != 1 or not kv.is_cpu:
            raise ValueError(f"Got KV memory of {list(kv.shape)}, {kv.dtype} but expected {list(shape)}, float32.")
        if start < 0 or length < 1 or start + length > capacity:
            raise ValueError(f"Got positions [{start}, {start + length}) but expected some in [0, {capacity}).")
    return (_SpanStruct * len(spans))(
        *(_SpanStruct(kv.data_ptr(), start, length, kv.stride()[:4]) for kv, start, length in spans)
    )


class NativeStepAttention:
    """Writes the new keys and values of all spans and attends over them, layer by layer."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span]) -> None:
        kernels = library()
        assert kernels is not None, "check has_native_attention() first"
        assert has_native_attention(config.head_dim)
        self._run = kernels.evenflow_attention
        self._num_spans = ctypes.c_int64(len(spans))
        self._kv = [span.kv for span in spans]  # keeps alive what the structures point to
        self._spans = native_spans(config, spans)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        windows = config.layer_windows
        shapes = {window: _Shape(*sizes, window or 0, 0, config.attention_scale) for window in set(windows)}
        self._shapes = [shapes[window] for window in windows]
        self._packed_size = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self._attended = torch.empty(sum(span.length for span in spans), config.num_heads * config.head_dim)
        self._attended_address = ctypes.c_void_p(self._attended.data_ptr())

    def __call__(self, layer: int, packed: Tensor) -> Tensor:
        """Attended rows for rows of [queries, keys, values]; the next layer reuses the returned memory."""
        packed = packed.contiguous()
        require("packed rows", packed, (len(self._attended), self._packed_size))
        self._run(
            self._spans,
            self._num_spans,
            ctypes.c_int64(layer),
            ctypes.byref(self._shapes[layer]),
            ctypes.c_void_p(packed.data_ptr()),
            self._attended_address,
        )
        return self._attended
