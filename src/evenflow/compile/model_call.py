"""One call of a causal language model, as its arguments stand: how long it is, and whether it may be cut into chunks.

Must not know: how chunks run, how large they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

Model: TypeAlias = Callable[..., Any]  # a transformers model, or anything that is called as one

# Arguments of a step that gives logits and a cache, nothing else.
STEP_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}
)
# Arguments that chunks can honour. Whatever else a call brings (images, token types, encoder states) belongs to the
# whole prompt in a way that only the model knows.
_HONOURED = STEP_ARGUMENTS | {"inputs_embeds", "cache_position", "output_hidden_states"}
_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})


def hugging_face_module(model: Model) -> Any:
    """The transformers model within: what compiled it or wrapped it may hide its signature and configuration."""
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "wrapped_module", None)) is not None:
        model = inner
    return model


def input_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of each; tokens are the last dimension of ids. No tokens where no input is to be seen."""
    shape = None
    if (tokens := args[0] if args else kwargs.get("input_ids")) is not None:
        shape = tokens.shape
    elif (embeddings := kwargs.get("inputs_embeds")) is not None:
        shape = embeddings.shape[:-1]
    if not shape:
        return 1, 0
    return (shape[0] if len(shape) > 1 else 1), shape[-1]


def named_arguments(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by the names that the model's `forward` gives them; what is None is left out."""
    names = list(forward_parameters(model))
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if value is not None}


def forward_parameters(model: Model) -> Mapping[str, inspect.Parameter]:
    module = hugging_face_module(model)
    return inspect.signature(getattr(module, "forward", module)).parameters


def why_not_in_chunks(model: Model, call: Mapping[str, Any]) -> str | None:
    """The reason why this call must run whole, or None. `call` holds arguments by name."""
    module = hugging_face_module(model)
    if "past_key_values" not in forward_parameters(model):
        return f"{type(module).__name__} takes no past_key_values"
    if getattr(module, "training", False):
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return "gradients are recorded, which keeps every activation anyway: call it within torch.inference_mode()"
    for name, value in call.items():
        if name not in _HONOURED and value is not False:
            return f"{name} is asked for, which needs the whole prompt at once"
    return _why_not_by_shape(call) or _why_not_by_config(module, call)


def _why_not_by_shape(call: Mapping[str, Any]) -> str | None:
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "the attention mask is not of shape (batch, tokens)"
    positions = call.get("position_ids")
    # Without a cache and a mask, positions that do not rise one by one mean several texts packed into one row.
    if positions is not None and mask is None and "past_key_values" not in call and not _rises_by_one(positions):
        return "several texts are packed into one row"
    return None


def _why_not_by_config(module: Any, call: Mapping[str, Any]) -> str | None:
    config = module.config.get_text_config()
    for name in ("output_attentions", "output_router_logits"):
        if name not in call and getattr(config, name, False):
            return f"{name} is set in the model's configuration, which needs the whole prompt at once"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        # Where a chunk ends decides how its positions are turned, so that chunks would not equal the whole.
        short = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if last_position(call) > short:
            return f"{rope['rope_type']} turns positions by the length of the whole input beyond {short:,} tokens"
    return None


def num_cached_tokens(call: Mapping[str, Any]) -> int:
    """Tokens that the call's cache holds before it runs."""
    cache = call.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def last_position(call: Mapping[str, Any]) -> int:
    """Tokens known after the call."""
    return num_cached_tokens(call) + input_shape((), call)[1]


def _rises_by_one(positions: Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())
