"""Attention of a step by the native kernel: the same as torch's, for all spans in one call.

Must not know: how a step is planned, what else the model does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from evenflow.native.build import library

_HEAD_DIM_STEP, _MAX_HEAD_DIM = 16, 256


class KvSpan(Protocol):
    """Rows of a step that are positions [start, start + length) of one sequence."""

    @property
    def kv(self) -> Tensor: ...  # [layers, 2, KV heads, capacity, head_dim]
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...


class _Span(ctypes.Structure):
    """`Span` of attention.h."""

    _fields_ = (
        ("kv", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("start", "length")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("layer", "values", "head", "token")),
    )


class _Shape(ctypes.Structure):
    """`AttentionShape` of attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_heads", "num_kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
    )
