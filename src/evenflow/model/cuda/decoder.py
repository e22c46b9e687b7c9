"""The decoder of the Llama family over paged KV memory: all rows of a step at once, on one device.

Nothing here waits for the device or depends on the values of a tensor, so that a graph can capture a whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from evenflow.model.config import ModelConfig
from evenflow.model.cuda.attention.backend import AttentionBackend
from evenflow.model.cuda.operations import Operations
from evenflow.model.projections import Projection, layer_projections, query_key_norms
from evenflow.model.rope import Rotation

# Larger matrix products are slower per row (10% at 8,192 rows on an H200) and need more memory.
_MLP_ROWS = 2048


class _Layer(NamedTuple):
    attention_norm: Tensor
    mlp_norm: Tensor
    query_key_norm: tuple[Tensor, Tensor] | None
    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection


class RowInputs(NamedTuple):
    """Inputs by row. A graph reads the same tensors each time."""

    token_ids: Tensor
    positions: Tensor
    entries: Tensor  # of the KV memory


class StepMemory(NamedTuple):
    """State passed from layer to layer of a step, by row."""

    residual: Tensor
    packed: Tensor  # queries, keys and values
    attended: Tensor
    cosines: Tensor
    sines: Tensor

    def first(self, num_rows: int) -> StepMemory:
        return StepMemory(*(part[:num_rows] for part in self))


class PagedDecoder:
    """A model's weights. `tensors` have the model's data type and device."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        attention: AttentionBackend,
        operations: Operations,
        max_model_len: int | None = None,
    ) -> None:
        self.config, self.attention, self._operations = config, attention, operations
        self._embedding = tensors["embed_tokens.weight"]
        self._layers = [_read_layer(config, tensors, index) for index in range(config.num_layers)]
        self._norm = tensors["norm.weight"]
        self._head = self._embedding if config.tie_embeddings else tensors["lm_head.weight"]
        positions = torch.arange(max_model_len or config.max_position, dtype=torch.float32)
        rotations = Rotation(config).rotations(positions)
        self._cosines, self._sines = (
            part.contiguous().to(self._embedding.device) for part in (rotations.real, rotations.imag)
        )

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def new_kv(self, num_blocks: int, block_size: int) -> Tensor:
        """KV memory of all layers; see `attention` for the shape of one."""
        config = self.config
        shape = (config.num_layers, num_blocks, 2, block_size, config.num_kv_heads, config.head_dim)
        # Zeros: padding rows read unwritten memory, where a NaN would spread.
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def kv_bytes_per_token(self) -> int:
        config = self.config
        return config.num_layers * 2 * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_memory(self, num_rows: int) -> StepMemory:
        config = self.config
        widths = (
            config.hidden_size,
            (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
            config.num_heads * config.head_dim,
        )
        rows = (torch.empty(num_rows, width, dtype=self.dtype, device=self.device) for width in widths)
        angles = (table.new_empty(num_rows, table.shape[1]) for table in (self._cosines, self._sines))
        return StepMemory(*rows, *angles)

    def hidden(self, inputs: RowInputs, kv: Tensor, kept: Tensor | None = None) -> Tensor:
        """Run all layers; returns the head's input for the rows in `kept` (None: all). Plan `attention` first.

        Writes the keys and values of every row into its entry of the KV memory.
        """
        memory = self.new_memory(len(inputs.token_ids))
        attend = self.attention_of(kv, memory)
        for index in range(self.config.num_layers):
            self.before_attention(index, inputs, kv, memory)
            attend(index)
        return self.after_last_attention(memory, kept)

    def before_attention(self, index: int, inputs: RowInputs, kv: Tensor, memory: StepMemory) -> None:
        """From the previous layer's attention, or the start, to this layer's. Independent of the layout."""
        config, layer, operations = self.config, self._layers[index], self._operations
        update = None
        if index:
            update = self._after_attention(index - 1, memory.residual, memory.attended)
        else:
            for table, rows, found in (
                (self._embedding, inputs.token_ids, memory.residual),
                (self._cosines, inputs.positions, memory.cosines),
                (self._sines, inputs.positions, memory.sines),
            ):
                torch.index_select(table, 0, rows, out=found)
        rows = operations.add_rms_norm(memory.residual, update, layer.attention_norm, config.rms_norm_eps)
        operations.linear(rows, *layer.qkv, memory.packed)
        operations.rope_and_write_kv(
            memory.packed,
            config.num_heads,
            kv[index],
            inputs.entries,
            (memory.cosines, memory.sines) if config.layer_uses_rope[index] else None,
            layer.query_key_norm,
            config.rms_norm_eps,
        )

    def attention_of(self, kv: Tensor, memory: StepMemory) -> Callable[[int], object]:
        """A function that runs one layer's attention of the planned step."""
        num_rows, config = len(memory.attended), self.config
        heads = memory.packed.view(num_rows, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        queries = heads[:, : config.num_heads]
        attended = memory.attended.view(num_rows, config.num_heads, config.head_dim)
        repeated = self.attention.repeated(queries, kv, attended)
        if repeated is not None:
            return lambda index: repeated()
        return lambda index: self.attention.run(index, queries, kv[index], attended)

    def after_last_attention(self, memory: StepMemory, kept: Tensor | None) -> Tensor:
        """The rest of the last layer. Rows no longer interact: unwanted ones are dropped."""
        residual, attended = memory.residual, memory.attended
        if kept is not None:
            residual, attended = residual.index_select(0, kept), attended.index_select(0, kept)
        update = self._after_attention(self.config.num_layers - 1, residual, attended)
        return self._operations.add_rms_norm(residual, update, self._norm, self.config.rms_norm_eps)

    def _after_attention(self, index: int, residual: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer; returns the update of `residual`."""
        layer, operations = self._layers[index], self._operations
        projected = operations.linear(attended, *layer.output)
        rows = operations.add_rms_norm(residual, projected, layer.mlp_norm, self.config.rms_norm_eps)
        num_pieces = -(-len(rows) // _MLP_ROWS)
        if num_pieces <= 1:
            return operations.linear(operations.silu_mul(operations.linear(rows, *layer.gate_up)), *layer.down)
        update = torch.empty_like(rows)
        for piece, target in zip(rows.tensor_split(num_pieces), update.tensor_split(num_pieces), strict=True):
            operations.linear(operations.silu_mul(operations.linear(piece, *layer.gate_up)), *layer.down, target)
        return update

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits of rows of `hidden`, in float32; written to `out` if given."""
        if out is None:
            # Sums are float32 anyway; rounding them would cost a pass and create ties.
            out = torch.empty(len(hidden), len(self._head), dtype=torch.float32, device=self.device)
        return self._operations.linear(hidden, self._head, None, out)

    def likeliest(self, logits: Tensor) -> Tensor:
        """By row, the token with the largest logit and that logit's bits: int32 [2, rows]."""
        return self._operations.largest(logits)


def _read_layer(config: ModelConfig, tensors: Mapping[str, Tensor], index: int) -> _Layer:
    return _Layer(
        tensors[f"layers.{index}.input_layernorm.weight"],
        tensors[f"layers.{index}.post_attention_layernorm.weight"],
        query_key_norms(config, tensors, index) if config.qk_norm else None,
        *layer_projections(config, tensors, index),
    )
