"""All layers of a decoder over a few rows, in one call of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from evenflow.model.attention.native import Span, native_spans
from evenflow.model.config import ModelConfig
from evenflow.native.build import library
from evenflow.native.matrix import MatrixStruct, NativeMatrix, address


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


class NativeLayers:
    """Runs up to `max_rows` rows through all layers."""

    def __init__(self, config: ModelConfig, layers: Sequence[NativeLayer]) -> None:
        kernels = library()
        assert kernels is not None, "check library() first"
        self._run = kernels.evenflow_layers
        self.max_rows = min(matrix.max_rows for layer in layers for matrix in layer.matrices)
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
            config.rms_norm_eps,
            config.attention_scale,
        )

    def run_(self, rows: Tensor, rotations: Tensor, spans: Sequence[Span]) -> None:
        """Replace embedded tokens by the last layer's output; `rotations` are each row's complex rotary factors."""
        self._run(
            ctypes.byref(self._model),
            ctypes.c_int64(len(rows)),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_void_p(rotations.data_ptr()),
            native_spans(spans),
            ctypes.c_int64(len(spans)),
        )
