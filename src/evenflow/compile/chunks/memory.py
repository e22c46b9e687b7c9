"""How many tokens of a prompt a model can take at once in the memory that is free now.

Must not know: who asks, nor how chunks run.
"""

from __future__ import annotations

from typing import Any

import torch

from evenflow.host import available_memory

_USABLE_SHARE = 0.5  # of what is free: the allocator fragments, and other programs want memory too
_SMALLEST_CHUNK = 16  # below that a chunk costs more time than it saves memory


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device; what torch holds without using it counts as free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return available_memory()


def bytes_per_token(config: Any, value_bytes: int, context: int, logits_per_token: int) -> int:
    """Working memory of one token of a chunk that sees `context` positions; the KV cache is not part of it.

    A layer is widest in its MLP. Attention counts where it is eager, since only that writes its scores: two copies of
    each, before and after the softmax, one of them in float32.
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
    """The longest chunk whose working memory fits into a part of what is free on the model's device."""
    parameter = next(module.parameters())
    needed = bytes_per_token(module.config, parameter.element_size(), context, 1 if all_logits else 0)
    usable = int(free_memory(parameter.device) * _USABLE_SHARE)
    return max(_SMALLEST_CHUNK, usable // (needed * batch_size))
