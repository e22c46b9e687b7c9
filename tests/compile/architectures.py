"""Small random models of transformers, one of each kind that chunks and compilers must support."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

WINDOW = 24

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GATED: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
_HYBRID = ["sliding_attention", "full_attention", "sliding_attention"]

# Name -> (class, settings). Falcon rotates positions, Bloom biases by distance, OPT and GPT-2 learn them.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GATED),
    "qwen2": ("Qwen2ForCausalLM", {"intermediate_size": 96, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", _GATED),
    "mistral-sliding": ("MistralForCausalLM", {**_GATED, "sliding_window": WINDOW}),
    "gemma": ("GemmaForCausalLM", _GATED),
    "gemma2": ("Gemma2ForCausalLM", {**_GATED, "sliding_window": WINDOW, "layer_types": _HYBRID}),
    "gemma3": ("Gemma3ForCausalLM", {**_GATED, "sliding_window": WINDOW, "layer_types": _HYBRID}),
    "phi3": ("Phi3ForCausalLM", {"intermediate_size": 96, "num_key_value_heads": 2}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "falcon": ("FalconForCausalLM", {"alibi": False}),
    "falcon-alibi": ("FalconForCausalLM", {"alibi": True}),
    "bloom": ("BloomForCausalLM", {}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"intermediate_size": 96}),
}
HYBRID_CACHES = ("mistral-sliding", "gemma2", "gemma3")


@cache
@torch.inference_mode(False)
def small_model(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A model with weights large enough for attention to prefer some tokens. Do not change it.

    Attention is eager where the architecture has no other.
    """
    class_name, settings = ARCHITECTURES[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    config = model_class.config_class(**{**_SIZES, **settings, **changes})
    config._attn_implementation = attention if model_class._supports_sdpa else "eager"
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms start out as zeros and ones, which hides mistakes
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = 0
    return model.eval()


def random_tokens(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, _SIZES["vocab_size"], (batch_size, length), generator=generator)


def padding_mask(lengths: list[int], side: str) -> torch.Tensor:
    """1 for each token, 0 for padding to the longest, on the left or on the right."""
    longest = max(lengths)
    rows = [[1] * length + [0] * (longest - length) for length in lengths]
    return torch.tensor([row[::-1] for row in rows] if side == "left" else rows)
