"""Attention of one step on a CPU by the native kernel: all sequences of a layer in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from evenflow.native.build import library

_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256

# Memory of one sequence [layers, 2, KV heads, capacity, head_dim], its first position in the step, number of positions.
SequenceSpan = tuple[Tensor, int, int]


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
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
    )


def has_native_attention(head_dim: int) -> bool:
    """Whether the kernel is available and supports heads of this size."""
    return head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _MAX_HEAD_DIM and library() is not None


def native_spans(spans: Sequence[SequenceSpan]) -> ctypes.Array[_Span]:
    """The spans as the kernels read them. The caller keeps their memory alive."""
    return (_Span * len(spans))(*(_Span(kv.data_ptr(), start, length, kv.stride()[:4]) for kv, start, length in spans))


class NativeStepAttention:
    """Writes the new keys and values of all spans and attends over them, layer by layer."""

    def __init__(
        self,
        spans: Sequence[SequenceSpan],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        layer_windows: Sequence[int | None],
    ) -> None:
        kernels = library()
        assert kernels is not None, "check has_native_attention() first"
        self._run = kernels.evenflow_attention
        self._num_spans = ctypes.c_int64(len(spans))
        self._kv = [kv for kv, _, _ in spans]  # keeps alive what the structures point to
        self._spans = native_spans(spans)
        sizes = num_heads, num_kv_heads, head_dim
        shapes = {window: _Shape(*sizes, window or 0, scale) for window in set(layer_windows)}
        self._shapes = [shapes[window] for window in layer_windows]
        self._attended = torch.empty(sum(length for _, _, length in spans), num_heads * head_dim)
        self._attended_address = ctypes.c_void_p(self._attended.data_ptr())

    def __call__(self, layer: int, packed: Tensor) -> Tensor:
        """Attended rows for rows of [queries, keys, values]; the next layer reuses the returned memory."""
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
