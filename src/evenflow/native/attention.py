"""Attention of one step on a CPU by the native kernel, all sequences of a layer in one call.

Must not know: weights, sampling, where the memory comes from, what runs where there is no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.native.build import library

if TYPE_CHECKING:
    from evenflow.model.attention.cpu import Span

_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256


class _Span(ctypes.Structure):
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
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


def has_native_attention(config: ModelConfig) -> bool:
    """Whether the kernel is here and takes heads of this size."""
    return config.head_dim % _HEAD_DIM_STEP == 0 and config.head_dim <= _MAX_HEAD_DIM and library() is not None


def native_spans(spans: Sequence[Span]) -> ctypes.Array[_Span]:
    """The spans as the kernels read them; they do not keep the spans' memory alive."""
    return (_Span * len(spans))(
        *(_Span(span.kv.data_ptr(), span.start, span.length, span.kv.stride()[:4]) for span in spans)
    )


class NativeStepAttention:
    """Writes the new keys and values of all spans and attends over them, layer by layer."""

    def __init__(self, config: ModelConfig, spans: Sequence[Span]) -> None:
        kernels = library()
        assert kernels is not None, "check has_native_attention() first"
        self._run = kernels.evenflow_attention
        self._num_spans = ctypes.c_int64(len(spans))
        # The memory that the structures below point into must live as long as they do.
        self._kv = [span.kv for span in spans]
        self._spans = native_spans(spans)
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        shapes = {window: _Shape(*sizes, window or 0, config.attention_scale) for window in set(config.layer_windows)}
        self._shapes = [shapes[window] for window in config.layer_windows]
        self._attended = torch.empty(sum(span.length for span in spans), config.num_heads * config.head_dim)
        self._attended_address = ctypes.c_void_p(self._attended.data_ptr())

    def __call__(self, layer: int, packed: Tensor) -> Tensor:
        """Rows of [queries, keys, values] in, attended rows out; the memory returned is reused by the next layer."""
        packed = packed.contiguous()
        self._run(
            self._spans,
            self._num_spans,
            ctypes.c_int64(layer),
            ctypes.byref(self._shapes[layer]),
            ctypes.c_void_p(packed.data_ptr()),
            self._attended_address,
        )
        return self._attended
