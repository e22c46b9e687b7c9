"""The tensors of a model by canonical name, each read from disk when it is looked up.

Names are those of Hugging Face checkpoints without the leading `model.`: `embed_tokens.weight`,
`layers.0.self_attn.q_proj.weight`, `norm.weight`, `lm_head.weight` (absent when it is the embedding).
"""

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch

from evenflow.core.roofline import ModelWork
from evenflow.errors import BrokenModel
from evenflow.model.config import ModelConfig, unsupported


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: its shape, and how to read it, on the CPU and in the type that it is stored in."""

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


class Weights(Mapping[str, torch.Tensor]):
    """Tensors by name, of one type and on one device; BrokenModel if one holds values that are no numbers.

    Each lookup reads from disk and caches nothing, so a loader that looks each name up once holds one copy of the
    model. Several threads may look up at a time.
    """

    def __init__(
        self,
        stored: Mapping[str, StoredTensor],
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._stored = stored
        self._device, self._dtype = device or torch.device("cpu"), dtype

    def on(self, device: torch.device, dtype: torch.dtype) -> Self:
        return type(self)(self._stored, device, dtype)

    def __getitem__(self, name: str) -> torch.Tensor:
        # Moved first: a GPU converts faster, and 16-bit types make the copy shorter.
        tensor = self._stored[name].read().to(self._device).to(self._dtype)
        # A sum is the fastest look at all values, and a model whose sums overflow computes nothing of use.
        if not math.isfinite(tensor.sum(dtype=torch.float32).item()):
            raise BrokenModel(f"the tensor {name} holds values that are not finite, or too large")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


class RandomWeights(Weights):
    """Random tensors of a model's shapes, made where they are needed; the same for each lookup."""

    @classmethod
    def of(cls, config: ModelConfig) -> Self:
        return cls({name: StoredTensor(shape, _never_read) for name, shape in needed_shapes(config).items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._stored[name].shape
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self._device, dtype=self._dtype)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.empty(shape, device=self._device, dtype=self._dtype)
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=generator)


def _never_read() -> torch.Tensor:
    raise AssertionError("a random tensor is not on disk")


def needed_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The names and shapes of all tensors of a model with this configuration."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, config.qkv_bias),
        "self_attn.k_proj": (keys, hidden, config.qkv_bias),
        "self_attn.v_proj": (keys, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (outputs, inputs, has_bias) in linears.items():
        shapes[f"{name}.weight"] = (outputs, inputs)
        if has_bias:
            shapes[f"{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    return shapes


def model_work(config: ModelConfig, itemsize: int) -> ModelWork:
    """What one step reads and multiplies, for a roofline, with weights and KV of `itemsize` bytes a number."""
    # A row of the embedding is looked up, not multiplied; tied, it is the head.
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
    num_weights = sum(math.prod(shape) for shape in needed_shapes(config).values()) - looked_up
    return ModelWork(
        num_layers=config.num_layers,
        row_flops=2.0 * num_weights,
        weight_bytes=float(num_weights * itemsize),
        position_flops=4.0 * config.num_layers * config.num_heads * config.head_dim,
        cache_bytes=float(2 * config.num_layers * config.num_kv_heads * config.head_dim * itemsize),
    )


def select_weights(stored: Mapping[str, StoredTensor], config: ModelConfig) -> Weights:
    """The tensors of a model with this configuration; an error if one is missing, misshapen or left over."""
    needed = needed_shapes(config)
    for name, shape in needed.items():
        if name not in stored:
            raise BrokenModel(f"the tensor {name} is missing")
        if stored[name].shape != shape:
            raise BrokenModel(f"the tensor {name} has shape {stored[name].shape}, the configuration says {shape}")
    for name in stored.keys() - needed.keys():
        # Some checkpoints hold the rope table they were trained with, or a second copy of a tied embedding.
        if not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight":
            raise unsupported(f"the tensor {name}, which no {config.architecture} of this configuration has,")
    return Weights({name: stored[name] for name in needed})
