"""Shapes of model families, for random weights: `config.json` alone is enough to start an engine with dummy weights.

Two are smaller than the published models so that they fit beside their KV memory: see their lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_QWEN3 = {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-6}
_COMMON = {
    "max_position_embeddings": 131072,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLAMA_8B: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_QWEN3_MOE = _COMMON | {  # Qwen3-30B-A3B
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    **_QWEN3,
}
_QWEN3_NEXT = _COMMON | {  # Qwen3-Next-80B-A3B with half the layers and a quarter of the experts
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_hidden_layers": 24,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 128,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rope_theta": 1e7,
    **_QWEN3,
}
_DEEPSEEK_LITE = _COMMON | {  # DeepSeek-V2-Lite, without its rope scaling
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "vocab_size": 102400,
    "rope_theta": 10000.0,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
_GEMMA3_LAYERS = 34
_GEMMA3 = _COMMON | {  # the text part of Gemma 3 4B: five layers in six see a window of 1,024 positions
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": _GEMMA3_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(_GEMMA3_LAYERS)],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    config: dict[str, Any]
    vllm: dict[str, Any] = field(default_factory=dict)  # further settings of vLLM


SHAPES = {
    "llama-8b": ModelShape(LLAMA_8B),
    "llama-8b-fp8": ModelShape(LLAMA_8B, {"quantization": "fp8"}),
    "llama-1b": ModelShape(_LLAMA_1B),
    "experts": ModelShape(_QWEN3_MOE),
    "hybrid": ModelShape(_QWEN3_NEXT, {"gdn_prefill_backend": "triton"}),
    "latent": ModelShape(_DEEPSEEK_LITE),
    "windows": ModelShape(_GEMMA3),
}
