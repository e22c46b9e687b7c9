"""Small configurations of every architecture and option that the decoders cover, and transformers' models of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from evenflow.model.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from tests.model.tiny import tiny_config

_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
_LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=32)
_YARN = YarnScaling(
    factor=4.0, original_max_position=32, beta_fast=32.0, beta_slow=1.0, attention_factor=1.1386, truncate=True
)
_LONG_FACTORS = tuple(1.0 + 0.5 * i for i in range(8))


def _with_rope(scaling: Any) -> ModelConfig:
    return tiny_config(rope=RopeConfig(theta=10000.0, rotary_dim=16, scaling=scaling))


# name: our configuration, transformers' model type, what its configuration needs besides the sizes
CASES: dict[str, tuple[ModelConfig, str, dict[str, Any]]] = {
    "llama": (tiny_config(), "llama", {"rope_parameters": _ROPE}),
    "llama, tied": (tiny_config(tie_embeddings=True), "llama", {"rope_parameters": _ROPE}),
    "llama, biases": (
        tiny_config(qkv_bias=True, output_bias=True, mlp_bias=True),
        "llama",
        {"rope_parameters": _ROPE, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, one KV head": (tiny_config(num_kv_heads=1), "llama", {"rope_parameters": _ROPE}),
    "llama, linear": (
        _with_rope(LinearScaling(4.0)),
        "llama",
        {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama, llama3": (
        _with_rope(_LLAMA3),
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama, yarn": (
        _with_rope(_YARN),
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "attention_factor": 1.1386,
            }
        },
    ),
    "llama, longrope": (
        _with_rope(FrequencyFactors(_LONG_FACTORS, attention_factor=1.19)),
        "llama",
        {
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": list(_LONG_FACTORS),
                "original_max_position_embeddings": 4,
                "factor": 32.0,
                "attention_factor": 1.19,
            }
        },
    ),
    "mistral, window": (
        tiny_config(layer_windows=(7, 7, 7, 7)),
        "mistral",
        {"rope_parameters": _ROPE, "sliding_window": 7},
    ),
    "qwen2": (tiny_config(qkv_bias=True), "qwen2", {"rope_parameters": _ROPE}),
    "qwen2, window on the upper layers": (
        tiny_config(qkv_bias=True, layer_windows=(None, None, 5, 5)),
        "qwen2",
        {"rope_parameters": _ROPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": (tiny_config(qk_norm=True), "qwen3", {"rope_parameters": _ROPE}),
    "smollm3": (
        tiny_config(layer_uses_rope=(True, True, True, False)),
        "smollm3",
        {
            "rope_parameters": _ROPE,
            "no_rope_layer_interval": 4,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


def transformers_model(name: str, tensors: Mapping[str, Tensor]) -> Any:
    """The transformers model of a case, with these very weights."""
    import transformers

    config, model_type, extra = CASES[name]
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }
    hf_config = transformers.AutoConfig.for_model(model_type, **sizes, **extra)
    hf_config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(hf_config).eval().float()
    state = {name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in tensors.items()}
    if config.tie_embeddings:
        state["lm_head.weight"] = tensors["embed_tokens.weight"]
    model.load_state_dict(state)
    return model
