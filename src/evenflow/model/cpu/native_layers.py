"""All layers of a decoder over a few rows, in one call of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cpu.native_attention import Span, native_spans
from evenflow.native.build import library
from evenflow.native.matrix import MatrixStruct, NativeMatrix, address, require


class _LayerStruct(ctypes.Structure):
    """`Layer` of decode.cpp."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_key_norm")),
        *((name, ctypes.c_int64) for name in ("uses_rope", "window")),
    )


_ROWS_AT_ONCE = 256  # each thread has memory for them; the weights are read once for all of them
_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_rotary_pairs", "fixed_order")


class _ModelStruct(ctypes.Structure):
    """`Model` of decode.cpp."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("norm_eps", "attention_scale")),
    )


class NativeLayer(NamedTuple):
    """One layer: its weights, whether heads are rotated, and its sliding window (None: it sees all positions).

    Matrices and norms are in the order of `Layer`.
    """

    matrices: Sequence[NativeMatrix]
    norms: Sequence[Tensor | None]
    uses_rope: bool
    window: int | None

    @property
    def struct(self) -> _LayerStruct:
        matrices, norms = (matrix.struct for matrix in self.matrices), map(address, self.norms)
        return _LayerStruct(*matrices, *norms, self.uses_rope, self.window or 0)

    def check(self, config: ModelConfig) -> None:
        """The kernel takes the sizes of all buffers from the model's."""
        hidden, heads, kv_heads = config.hidden_size, config.num_heads, config.num_kv_heads
        attended, inner = heads * config.head_dim, config.intermediate_size
        packed = attended + 2 * kv_heads * config.head_dim
        expected = [(packed, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)]
        if [tuple(matrix.shape) for matrix in self.matrices] != expected:
            raise ValueError(f"Got matrices {[tuple(one.shape) for one in self.matrices]} but expected {expected}.")
        shapes = (hidden,), (hidden,), (heads + kv_heads, config.head_dim)
        for norm, shape in zip(self.norms, shapes, strict=True):
            if norm is not None:
                require("norm", norm, shape)


class NativeLayers:
    """Runs up to `max_rows` rows through all layers.

    In fixed order, a row's result is bitwise the same in any step.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[NativeLayer], *, fixed_order: bool = False) -> None:
        kernels = library()
        assert kernels is not None, "check library() first"
        self._run = kernels.evenflow_layers
        self.max_rows = min(matrix.max_rows for layer in layers for matrix in layer.matrices)
        if len(layers) != config.num_layers:
            raise ValueError(f"Got {len(layers)} layers but expected {config.num_layers}.")
        for layer in layers:
            layer.check(config)
        self._config = config
        self._weights = layers  # keeps alive what the structures point to
        self._layers = (_LayerStruct * len(layers))(*(layer.struct for layer in layers))
        self._model = _ModelStruct(
            ctypes.addressof(self._layers),
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rope.rotary_dim // 2,
            fixed_order,
            config.rms_norm_eps,
            config.attention_scale,
        )

    def run_(self, rows: Tensor, rotations: Tensor, spans: Sequence[Span]) -> None:
        """Replace embedded tokens by the last layer's output; `rotations` are each row's complex rotary factors."""
        num_rows = sum(span.length for span in spans)
        require("rows", rows, (num_rows, self._config.hidden_size))
        require("rotations", rotations, (num_rows, self._config.rope.rotary_dim // 2), torch.complex64)
        first = 0
        for group in _groups(spans, _ROWS_AT_ONCE):
            num_rows = sum(span.length for span in group)
            self._run(
                ctypes.byref(self._model),
                ctypes.c_int64(num_rows),
                ctypes.c_void_p(rows[first:].data_ptr()),
                ctypes.c_void_p(rotations[first:].data_ptr()),
                native_spans(self._config, group),
                ctypes.c_int64(len(group)),
            )
            first += num_rows


def _groups(spans: Sequence[Span], max_rows: int) -> Iterator[list[Span]]:
    """The same rows in groups of at most `max_rows`: a span may be divided."""
    group: list[Span] = []
    room = max_rows
    for span in spans:
        start = span.start
        while start < span.end:
            length = min(span.end - start, room)
            group.append(Span(span.kv, start, length))
            start, room = start + length, room - length
            if not room:
                yield group
                group, room = [], max_rows
    if group:
        yield group


class NativeNorm:
    """The norm of `NativeLayers`, for the rows that it returns."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        kernels = library()
        assert kernels is not None, "check library() first"
        self._run, self._weight, self._eps = kernels.evenflow_norm, weight.contiguous(), eps
        require("weight", self._weight, (weight.numel(),))

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        require("rows", rows, (len(rows), len(self._weight)))
        normed = torch.empty_like(rows)
        self._run(
            ctypes.c_void_p(rows.data_ptr()),
            *map(ctypes.c_int64, rows.shape),
            ctypes.c_void_p(self._weight.data_ptr()),
            ctypes.c_float(self._eps),
            ctypes.c_void_p(normed.data_ptr()),
        )
        return normed
