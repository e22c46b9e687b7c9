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
        *((name, MatrixStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_key_norm")),
        *((name, ctypes.c_int64) for name in ("uses_rope", "window")),
    )


_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_rotary_pairs")


class _ModelStruct(ctypes.Structure):
    """`Model` of decode.cpp."""

    _fields_ = (
        ("layers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("norm_eps", "attention_scale")),
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
    def max_rows(self) -> int:
        return min(matrix.max_rows for matrix in (self.qkv, self.output, self.gate_up, self.down))

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
    """Runs up to `max_rows` rows through all layers."""

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
        assert kernels is not None, "check library() first"
        self._run = kernels.evenflow_layers
        self.max_rows = min(layer.max_rows for layer in layers)
        self._weights = layers  # keeps alive what the structures point to
        self._layers = (_LayerStruct * len(layers))(*(layer.struct for layer in layers))
        sizes = len(layers), len(layers[0].attention_norm), num_heads, num_kv_heads, head_dim, num_rotary_pairs
        self._model = _ModelStruct(ctypes.addressof(self._layers), *sizes, norm_eps, attention_scale)

    def run_(self, rows: Tensor, rotations: Tensor, spans: Sequence[SequenceSpan]) -> None:
        """Replace embedded tokens by the last layer's output; `rotations` are each row's complex rotary factors."""
        self._run(
            ctypes.byref(self._model),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(rotations.data_ptr()),
            native_spans(spans),
            ctypes.c_int64(len(spans)),
        )
