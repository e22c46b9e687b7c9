"""All layers of a decoder over a few rows, in one call of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from evenflow.native.attention import SequenceSpan, native_spans
from evenflow.native.build import library
from evenflow.native.matrix import MatrixStruct, NativeMatrix


class _LayerStruct(ctypes.Structure):
    """`Layer` of decode.cpp."""

    _fields_ = (
        ("qkv", MatrixStruct),
        ("output", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("query_key_norm", ctypes.c_void_p),
        ("uses_rope", ctypes.c_int64),
        ("window", ctypes.c_int64),
    )


class _ModelStruct(ctypes.Structure):
    """`Model` of decode.cpp."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("hidden_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("num_pairs", ctypes.c_int64),
        ("norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class NativeLayer:
    """One layer: its weights, whether heads are rotated, and its sliding window (None: it sees all positions)."""

    qkv: NativeMatrix
    output: NativeMatrix
    gate_up: NativeMatrix
    down: NativeMatrix
    attention_norm: Tensor
    mlp_norm: Tensor
    query_key_norm: Tensor | None
    uses_rope: bool
    window: int | None

    @property
    def most_rows(self) -> int:
        return min(matrix.most_rows for matrix in (self.qkv, self.output, self.gate_up, self.down))

    @property
    def struct(self) -> _LayerStruct:
        return _LayerStruct(
            self.qkv.struct,
            self.output.struct,
            self.gate_up.struct,
            self.down.struct,
            self.attention_norm.data_ptr(),
            self.mlp_norm.data_ptr(),
            None if self.query_key_norm is None else self.query_key_norm.data_ptr(),
            self.uses_rope,
            self.window or 0,
        )


class NativeLayers:
    """Runs up to `most_rows` rows through all layers."""

    def __init__(
        self,
        layers: Sequence[NativeLayer],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_rotary_pairs: int,
        norm_eps: float,
        attention_scale: float,
    ) -> None:
        kernels = library()
        assert kernels is not None, "there are no native kernels here"
        self._run = kernels.evenflow_layers
        self.most_rows = min(layer.most_rows for layer in layers)
        self._weights = layers  # what the structures point to must live as long as they do
        self._layers = (_LayerStruct * len(layers))(*(layer.struct for layer in layers))
        hidden_size = len(layers[0].attention_norm)
        self._model = _ModelStruct(
            ctypes.addressof(self._layers),
            *(len(layers), hidden_size, num_heads, num_kv_heads, head_dim, num_rotary_pairs, norm_eps, attention_scale),
        )

    def run_(self, rows: Tensor, turns: Tensor, spans: Sequence[SequenceSpan]) -> None:
        """Replace embedded tokens by the last layer's output; `turns` are each row's complex rotary factors."""
        self._run(
            ctypes.byref(self._model),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(turns.data_ptr()),
            native_spans(spans),
            ctypes.c_int64(len(spans)),
        )
