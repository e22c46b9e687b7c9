"""How many tokens of a prompt fit into free memory at once."""

from __future__ import annotations

from typing import Any

import torch

from evenflow.compile.model_call import Model, hugging_face_module, is_transformers_model
from evenflow.host import available_memory

_USABLE_SHARE = 0.5  # of free memory: allocators fragment it, and other programs use some too
SMALLEST_CHUNK = 16  # smaller chunks cost more time than they save memory


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device, including those that torch has reserved but does not use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return available_memory()


def bytes_per_token(config: Any, value_bytes: int, context: int, logits_per_token: int) -> int:
    """Working memory of one token of a chunk that sees `context` positions, without the KV cache.

    A layer is widest in its MLP. Only eager attention writes its scores: before and after the softmax, once in float32.
    """
    text = config.get_text_config()
    hidden: int = text.hidden_size
    inner: int = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden
    activations = (2 * hidden + 3 * inner) * value_bytes
    scores: int = 0
    if getattr(text, "_attn_implementation", None) == "eager":
        scores = text.num_attention_heads * context * (4 + value_bytes)
    logits: int = logits_per_token * text.vocab_size * value_bytes
    return activations + scores + logits


def tokens_that_fit(module: Any, batch_size: int, context: int, all_logits: bool) -> int:
    """The longest chunk whose working memory fits into half of what is free on the model's device."""
    parameter = next(module.parameters())
    needed = bytes_per_token(module.config, parameter.element_size(), context, 1 if all_logits else 0)
    usable = int(free_memory(parameter.device) * _USABLE_SHARE)
    return max(SMALLEST_CHUNK, usable // (needed * batch_size))


def memory_pressure(model: Model, num_tokens: int) -> str | None:
    """Why an input of this length does not fit in one piece, or None if it does."""
    module = hugging_face_module(model)
    if not is_transformers_model(module):
        return None
    fitting = tokens_that_fit(module, batch_size=1, context=num_tokens, all_logits=False)
    if num_tokens <= fitting:
        return None
    return f"of an input of {num_tokens:,} tokens, {fitting:,} at a time fit into free memory"
