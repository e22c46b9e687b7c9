"""Reads the configuration in a GGUF file of llama.cpp, and says whether evenflow's own engine runs such a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from evenflow.model.config import (
    SUPPORTED_FAMILIES,
    FrequencyFactors,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    checked_num_layers,
    unsupported,
    yarn_attention_factor,
)
from evenflow.model.formats.gguf_file import GgufFile

if TYPE_CHECKING:
    from evenflow.model.text.tokenizer import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """Properties that llama.cpp does not write into the file.

    `interleaves_rope`: query and key rows are stored with rotary pairs side by side.
    `rope_free_every`: every n-th layer attends without positions; 0: none.
    """

    interleaves_rope: bool = False
    qk_norm: bool = False
    rope_free_every: int = 0


_ARCHITECTURES = {
    "llama": GgufArchitecture(interleaves_rope=True),
    "smollm3": GgufArchitecture(interleaves_rope=True, rope_free_every=4),
    "qwen2": GgufArchitecture(),
    "qwen3": GgufArchitecture(qk_norm=True),
}


def supported_architecture(file: GgufFile) -> GgufArchitecture:
    """The architecture in the file, or UnsupportedModel."""
    name = file.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise unsupported(f"the architecture {name!r} (supported: {SUPPORTED_FAMILIES})")
    if file.get("split.count", int, 1) > 1:
        raise unsupported("a model split over several GGUF files")
    if file.get(f"{name}.expert_count", int, 0) > 0:
        raise unsupported("a mixture of experts")
    return _ARCHITECTURES[name]


def read_gguf_config(file: GgufFile, architecture: GgufArchitecture, tokenizer: Tokenizer) -> ModelConfig:
    """The configuration; the special tokens are the tokenizer's."""
    name = file.get("general.architecture", str)
    hidden_size = file.get(f"{name}.embedding_length", int)
    num_layers = checked_num_layers(file.get(f"{name}.block_count", int))
    num_heads = file.get(f"{name}.attention.head_count", int)
    head_dim = file.get(f"{name}.attention.key_length", int, hidden_size // max(num_heads, 1))
    window = file.get(f"{name}.attention.sliding_window", int, 0) or None
    return ModelConfig(
        architecture=name,
        vocab_size=file.get(f"{name}.vocab_size", int, tokenizer.vocab_size),
        hidden_size=hidden_size,
        intermediate_size=file.get(f"{name}.feed_forward_length", int),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=file.get(f"{name}.attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        max_position=file.get(f"{name}.context_length", int),
        rms_norm_eps=file.get(f"{name}.attention.layer_norm_rms_epsilon", float),
        attention_scale=file.get(f"{name}.attention.scale", float, 0.0) or max(head_dim, 1) ** -0.5,
        rope=RopeConfig(
            theta=file.get(f"{name}.rope.freq_base", float, 10000.0),
            rotary_dim=file.get(f"{name}.rope.dimension_count", int, head_dim),
            scaling=_read_rope_scaling(file, name),
        ),
        layer_windows=(window,) * num_layers,
        layer_uses_rope=tuple(_uses_rope(layer, architecture) for layer in range(num_layers)),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture.qk_norm,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tokenizer.eos_token_ids,
    )


def _uses_rope(layer: int, architecture: GgufArchitecture) -> bool:
    return architecture.rope_free_every == 0 or (layer + 1) % architecture.rope_free_every != 0


def _read_rope_scaling(file: GgufFile, name: str) -> RopeScaling | None:
    if ROPE_FACTORS in file.tensors:
        return FrequencyFactors(tuple(file.read(ROPE_FACTORS).tolist()), attention_factor=1.0)
    kind = file.get(f"{name}.rope.scaling.type", str, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise unsupported(f"the rope scaling {kind!r}")
    factor = file.get(f"{name}.rope.scaling.factor", float)
    if kind == "linear":
        return LinearScaling(factor)
    return YarnScaling(
        factor=factor,
        original_max_position=file.get(f"{name}.rope.scaling.original_context_length", int),
        beta_fast=file.get(f"{name}.rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=file.get(f"{name}.rope.scaling.yarn_beta_slow", float, 1.0),
        attention_factor=file.get(f"{name}.rope.scaling.attn_factor", float, 1.0) * yarn_attention_factor(factor),
        truncate=True,
    )
