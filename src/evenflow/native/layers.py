"""All layers of a decoder over a few rows, in one call of the native kernels.

Must not know: when few rows are few enough, what runs where there are no kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.native.attention import native_spans
from evenflow.native.build import library
from evenflow.native.matrix import MatrixStruct, NativeMatrix

if TYPE_CHECKING:
    from evenflow.model.attention.cpu import Span


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
    """The weights of one layer."""

    qkv: NativeMatrix
    output: NativeMatrix
    gate_up: NativeMatrix
    down: NativeMatrix
    attention_norm: Tensor
    mlp_norm: Tensor
    query_key_norm: Tensor | None

    @property
    def most_rows(self) -> int:
        return min(matrix.most_rows for matrix in (self.qkv, self.output, self.gate_up, self.down))


class NativeLayers:
    def __init__(self, config: ModelConfig, layers: Sequence[NativeLayer]) -> None:
        kernels = library()
        assert kernels is not None, "there are no native kernels here"
        self._run = kernels.evenflow_layers
        self.most_rows = min(layer.most_rows for layer in layers)
        self._weights = layers  # what the structures point to must live as long as they do
        self._layers = (_LayerStruct * len(layers))(
            *(
                _layer_struct(layer, uses_rope, window or 0)
                for layer, uses_rope, window in zip(layers, config.layer_uses_rope, config.layer_windows, strict=True)
            )
        )
        self._model = _ModelStruct(
            ctypes.addressof(self._layers),
            config.num_layers,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rope.rotary_dim // 2,
            config.rms_norm_eps,
            config.attention_scale,
        )

    def run_(self, rows: Tensor, turns: Tensor, spans: Sequence[Span]) -> None:
        """Embedded tokens become what the last layer leaves; `turns` are each row's rotary factors, complex."""
        self._run(
            ctypes.byref(self._model),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(turns.data_ptr()),
            native_spans(spans),
            ctypes.c_int64(len(spans)),
        )


def _layer_struct(layer: NativeLayer, uses_rope: bool, window: int) -> _LayerStruct:
    norm = layer.query_key_norm
    return _LayerStruct(
        layer.qkv.struct,
        layer.output.struct,
        layer.gate_up.struct,
        layer.down.struct,
        layer.attention_norm.data_ptr(),
        layer.mlp_norm.data_ptr(),
        None if norm is None else norm.data_ptr(),
        uses_rope,
        window,
    )
