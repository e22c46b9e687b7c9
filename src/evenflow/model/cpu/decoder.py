"""The decoder of the Llama family: token ids in, logits out, all sequences of a step packed into one run of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cpu.attention import StepAttention, attention_for, runs_natively
from evenflow.model.cpu.linear import Linear
from evenflow.model.cpu.native_attention import Span
from evenflow.model.cpu.native_layers import NativeLayer, NativeLayers, NativeNorm
from evenflow.model.projections import layer_projections, query_key_norms
from evenflow.model.rope import Rotation, rotate_

MakeLinear = Callable[[Tensor, Tensor | None], Linear]


class Remainder(NamedTuple):
    """The rows of a step that go on, when others are left out between two layers."""

    rows: Sequence[int]  # of those so far
    spans: Sequence[Span]
    wanted: Sequence[int]  # of those that go on


class Decoder:
    """A model's weights, laid out for running."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        make_linear: MakeLinear,
        make_head: MakeLinear | None = None,
        *,
        fixed_order: bool = False,
    ) -> None:
        """In fixed order, a row's logits are bitwise the same in any step; the linears must be `fixed_order`'s."""
        self.config = config
        self._rotation = Rotation(config)
        self._attention_of = attention_for(config)
        self._embedding = tensors["embed_tokens.weight"]
        self._layers = [_Layer(config, index, tensors, make_linear) for index in range(config.num_layers)]
        self._native = _native_layers(config, self._layers, fixed_order)
        self._norm = (NativeNorm if fixed_order else RmsNorm)(tensors["norm.weight"], config.rms_norm_eps)
        head_weight = self._embedding if config.tie_embeddings else tensors["lm_head.weight"]
        self._head = (make_head or make_linear)(head_weight, None)

    def hidden(
        self,
        token_ids: Sequence[int],
        spans: Sequence[Span],
        wanted: Sequence[int] | None = None,
        cut: Callable[[int], Remainder | None] | None = None,
    ) -> Tensor:
        """The last layer's output for the rows in `wanted` (None: all rows).

        Writes the new keys and values of all rows into the spans' memory. `cut` is asked after each layer but the last,
        with how many have run, which rows go on (None: all). Steps of few rows run all layers at once, and do not ask.
        """
        positions = [position for span in spans for position in range(span.start, span.end)]
        if len(token_ids) != len(positions):
            raise ValueError(f"Got {len(token_ids)} token ids for {len(positions)} positions.")
        rotations = self._rotation.rotations(torch.tensor(positions, dtype=torch.float32))
        rows = F.embedding(torch.tensor(token_ids), self._embedding)
        kept = None if wanted is None or len(wanted) == len(rows) else torch.tensor(wanted, dtype=torch.int64)
        if self._native is not None and len(rows) <= self._native.max_rows:
            self._native.run_(rows, rotations, spans)
            return rows if kept is None else rows[kept]
        factors = self._rotation.factors(rotations)
        attention = self._attention_of(spans)
        for done, layer in enumerate(self._layers[:-1], 1):
            rows = layer(rows, factors, attention)
            if cut is not None and (remainder := cut(done)) is not None:
                going_on = torch.tensor(remainder.rows)
                rows, factors = rows[going_on], factors[going_on]
                attention = self._attention_of(remainder.spans)
                kept = torch.tensor(remainder.wanted, dtype=torch.int64)
        # After the last attention rows no longer interact: unwanted ones are dropped there.
        return self._layers[-1](rows, factors, attention, kept)

    def normed(self, hidden: Tensor) -> Tensor:
        """Rows of `hidden` after the final norm: what embeddings are made of."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The vocabulary's scores for rows of `hidden`."""
        return self._head(self._norm(hidden))


def _native_layers(config: ModelConfig, layers: Sequence[_Layer], fixed_order: bool) -> NativeLayers | None:
    """The layers for steps of few rows, or of any in fixed order, if the native kernels support this model."""
    native = [found for layer in layers if (found := layer.native) is not None]
    if len(native) == len(layers) and runs_natively(config):
        return NativeLayers(config, native, fixed_order=fixed_order)
    assert not fixed_order, "check runs_natively() first"
    return None


class RmsNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight
        self._eps = torch.full((1, 1), eps)
        self._inverse_size = 1 / len(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        # Four small operations: a third less than F.rms_norm, which runs as nine.
        norm = torch.linalg.vector_norm(rows, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=self._inverse_size).rsqrt_()
        return torch.mul(rows, scale).mul_(self.weight)


class _Layer:
    def __init__(self, config: ModelConfig, index: int, tensors: Mapping[str, Tensor], make_linear: MakeLinear) -> None:
        def norm(name: str) -> RmsNorm:
            return RmsNorm(tensors[f"layers.{index}.{name}.weight"], config.rms_norm_eps)

        self._index = index
        self._uses_rope, self._window = config.layer_uses_rope[index], config.layer_windows[index]
        self._query_key_norm = _QueryKeyNorm(config, index, tensors) if config.qk_norm else None
        self._attention_norm = norm("input_layernorm")
        self._mlp_norm = norm("post_attention_layernorm")
        linears = (make_linear(*projection) for projection in layer_projections(config, tensors, index))
        self._qkv, self._output, self._gate_up, self._down = linears

    @property
    def native(self) -> NativeLayer | None:
        """The same weights for the native kernels; None if one of the linears has no native form."""
        linears = self._qkv, self._output, self._gate_up, self._down
        matrices = [linear.native for linear in linears if linear.native is not None]
        query_key_norm = None if self._query_key_norm is None else self._query_key_norm.weight
        norms = self._attention_norm.weight, self._mlp_norm.weight, query_key_norm
        return NativeLayer(matrices, norms, self._uses_rope, self._window) if len(matrices) == len(linears) else None

    def __call__(self, rows: Tensor, factors: Tensor, attention: StepAttention, kept: Tensor | None = None) -> Tensor:
        packed = self._qkv(self._attention_norm(rows))
        if self._query_key_norm is not None:
            self._query_key_norm.apply_(packed)
        if self._uses_rope:
            rotate_(packed, factors)
        attended = attention(self._index, packed)
        if kept is not None:
            rows, attended = rows[kept], attended[kept]
        rows = self._output.add_to(rows, attended)
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, dim=1)
        return self._down.add_to(rows, F.silu(gate).mul_(up))


class _QueryKeyNorm:
    """RMSNorm of each query and key head."""

    def __init__(self, config: ModelConfig, index: int, tensors: Mapping[str, Tensor]) -> None:
        self._num_heads = config.num_heads + config.num_kv_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        query, key = query_key_norms(config, tensors, index)
        self.weight = torch.cat((query.expand(config.num_heads, -1), key.expand(config.num_kv_heads, -1)))

    def apply_(self, packed: Tensor) -> None:
        heads = packed.view(packed.shape[0], -1, self._head_dim)[:, : self._num_heads]
        heads.copy_(F.rms_norm(heads, (self._head_dim,), eps=self._eps).mul_(self.weight))
