"""A Llama-family model from a GGUF file of llama.cpp: its configuration and tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

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
from evenflow.model.gguf_file import GgufFile
from evenflow.model.gguf_tokenizer import read_gguf_tokenizer
from evenflow.model.tokenizer import Tokenizer
from evenflow.model.weights import StoredTensor

_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_TENSORS = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Architecture:
    """Properties that llama.cpp does not write into the file.

    `interleaves_rope`: query and key rows are stored with rotary pairs side by side.
    `rope_free_every`: every n-th layer attends without positions; 0: none.
    """

    interleaves_rope: bool = False
    qk_norm: bool = False
    rope_free_every: int = 0


_ARCHITECTURES = {
    "llama": _Architecture(interleaves_rope=True),
    "smollm3": _Architecture(interleaves_rope=True, rope_free_every=4),
    "qwen2": _Architecture(),
    "qwen3": _Architecture(qk_norm=True),
}


def read_gguf_model(path: Path) -> tuple[ModelConfig, Tokenizer, dict[str, StoredTensor]]:
    """The configuration, tokenizer and tensors of a GGUF file."""
    file = GgufFile(path)
    name = file.get("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise unsupported(f"the architecture {name!r} (supported: {SUPPORTED_FAMILIES})")
    if file.get("split.count", int, 1) > 1:
        raise unsupported("a model split over several GGUF files")
    if file.get(f"{name}.expert_count", int, 0) > 0:
        raise unsupported("a mixture of experts")
    tokenizer = read_gguf_tokenizer(file)
    config = _read_config(file, name, _ARCHITECTURES[name], tokenizer)
    if _ARCHITECTURES[name].interleaves_rope and config.rope.rotary_dim != config.head_dim:
        raise unsupported(f"{name} with positions on {config.rope.rotary_dim} of {config.head_dim} head values")
    return config, tokenizer, _stored_tensors(file, config, _ARCHITECTURES[name])


def _read_config(file: GgufFile, name: str, architecture: _Architecture, tokenizer: Tokenizer) -> ModelConfig:
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


def _uses_rope(layer: int, architecture: _Architecture) -> bool:
    return architecture.rope_free_every == 0 or (layer + 1) % architecture.rope_free_every != 0


def _read_rope_scaling(file: GgufFile, name: str) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        return FrequencyFactors(tuple(file.read(_ROPE_FACTORS).tolist()), attention_factor=1.0)
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


def _stored_tensors(file: GgufFile, config: ModelConfig, architecture: _Architecture) -> dict[str, StoredTensor]:
    stored = {}
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == _ROPE_FACTORS:
            continue
        name = _canonical_name(gguf_name)
        read = partial(file.read, gguf_name)
        if architecture.interleaves_rope and ".q_proj." in name:
            read = partial(_split_halves, read, config.num_heads)
        elif architecture.interleaves_rope and ".k_proj." in name:
            read = partial(_split_halves, read, config.num_kv_heads)
        stored[name] = StoredTensor(tensor.shape, read)
    return stored


def _canonical_name(gguf_name: str) -> str:
    if gguf_name in _OTHER_TENSORS:
        return _OTHER_TENSORS[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_TENSORS:
        return f"layers.{parts[1]}.{_LAYER_TENSORS[parts[2]]}.{parts[3]}"
    return gguf_name


def _split_halves(read: Callable[[], torch.Tensor], num_heads: int) -> torch.Tensor:
    """Reorder each head's rows from rotary pairs side by side, (0, 1), to pairs half a head apart, (0, n / 2)."""
    rows = read()
    return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
