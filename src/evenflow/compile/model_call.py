"""One call of a causal language model: its arguments by name, its length, and whether it can run in chunks.

Token ids are tensors or plain lists: [tokens] or [sequences][tokens].
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from evenflow.errors import InvalidInput

Model: TypeAlias = Callable[..., Any]  # a transformers model, or anything called like one

# Arguments of a step that returns logits and a cache, nothing else.
STEP_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict"}
)
# Arguments that chunks support. Any other (images, token types, encoder states) belongs to the whole prompt in a way
# that only the model knows.
_CHUNK_ARGUMENTS = STEP_ARGUMENTS | {"inputs_embeds", "cache_position", "output_hidden_states"}
_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids")
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_model(model: object) -> None:
    if not callable(model):
        expected = "a model to call, such as transformers.AutoModelForCausalLM.from_pretrained(NAME)"
        raise InvalidInput(f"Got {repr(model)[:100]} but expected {expected}.")


def hugging_face_module(model: Model) -> Any:
    """The transformers model inside a compiled or wrapped one, with its signature and configuration."""
    while (inner := getattr(model, "_orig_mod", None) or getattr(model, "wrapped_module", None)) is not None:
        model = inner
    return model


def model_name(model: Model) -> str:
    """The folder it was loaded from, else its class."""
    module = hugging_face_module(model)
    path = getattr(getattr(module, "config", None), "_name_or_path", None)
    return Path(path or "").name or type(module).__name__


def is_transformers_model(module: Any) -> bool:
    """Whether a model has transformers' configuration, which says what it computes."""
    return hasattr(getattr(module, "config", None), "get_text_config") and hasattr(module, "parameters")


def input_shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Number of sequences, and tokens in each (the last dimension of ids); no tokens if there is no input."""
    shape = None
    if (tokens := args[0] if args else kwargs.get("input_ids")) is not None:
        shape = tokens.shape if isinstance(tokens, Tensor) else _shape_of(tokens)
    elif (embeddings := kwargs.get("inputs_embeds")) is not None:
        shape = embeddings.shape[:-1]
    if not shape:
        return 1, 0
    return (shape[0] if len(shape) > 1 else 1), shape[-1]


def _shape_of(tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, list):
        return tuple(getattr(tokens, "shape", ()))
    rows = [row for row in tokens if isinstance(row, list)]
    if not rows:
        return (len(tokens),)
    lengths = sorted({len(row) for row in rows})
    if len(rows) != len(tokens) or len(lengths) != 1:
        found = "lists beside numbers" if len(rows) != len(tokens) else f"rows of {lengths[0]} to {lengths[-1]} tokens"
        raise InvalidInput(f"Got token ids with {found}: give a batch as rows of one length, padded, with a mask.")
    return len(rows), lengths[0]


def with_token_tensors(
    model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call, with ids as transformers takes them if the model is one of its: of (batch, tokens)."""
    module = hugging_face_module(model)
    if not is_transformers_model(module) or hasattr(model, "process_chunk"):
        return args, kwargs
    named = {name: _as_rows(module, value) if name in _TOKEN_ARGUMENTS else value for name, value in kwargs.items()}
    return (_as_rows(module, args[0]), *args[1:]) if args else args, named


def _as_rows(module: Any, tokens: Any) -> Any:
    if isinstance(tokens, list):
        _shape_of(tokens)
        tokens = torch.tensor(tokens, device=getattr(module, "device", None))
    return tokens[None] if isinstance(tokens, Tensor) and tokens.ndim == 1 else tokens


def example_calls(model: Model, inputs: Any) -> list[dict[str, Any]]:
    """The calls that example inputs stand for, each by the names of its arguments.

    One example is a tensor or a list of ids, a mapping of arguments (a tokenizer's output), or a tuple: the arguments
    of one call in the model's order. A list of such examples is several, of any lengths.
    """
    is_several = isinstance(inputs, list) and not all(isinstance(item, int) for item in inputs)
    calls = []
    for example in inputs if is_several else [inputs]:
        if hasattr(example, "keys"):
            named = named_arguments(model, (), example)
        elif isinstance(example, Tensor) or (isinstance(example, list) and example):
            named = named_arguments(model, (example,), {})
        elif isinstance(example, tuple) and example and not any(isinstance(item, int) for item in example):
            named = named_arguments(model, example, {})
        else:
            raise InvalidInput(
                f"Got {type(example).__name__} as example inputs but expected ids (a tensor or a list), a tokenizer's "
                "output, a tuple of the arguments of one call, or a list of such examples, none of them empty."
            )
        calls.append(dict(with_token_tensors(model, (), named)[1]))
    return calls


def named_arguments(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by their names in the model's `forward`, without those that are None."""
    named = {**dict(zip(forward_parameters(model), args, strict=False)), **kwargs}
    return {name: value for name, value in named.items() if value is not None}


def forward_parameters(model: Model) -> Mapping[str, inspect.Parameter]:
    """The parameters that the model is called with; none if they cannot be known."""
    if (known := getattr(model, "call_parameters", None)) is not None:
        return cast(Mapping[str, inspect.Parameter], known)
    module = hugging_face_module(model)
    try:
        return inspect.signature(getattr(module, "forward", module)).parameters
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}


def why_not_supported(module: Any, config: Any, call: Mapping[str, Any], supported: Set[str]) -> str | None:
    """Why a run that computes just logits and a cache cannot replace this call, given by its named arguments."""
    if getattr(module, "training", False):
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return "gradients are recorded, which keeps every activation: call it within torch.inference_mode()"
    for name, value in call.items():
        if name not in supported and value is not False:
            return f"{name} is not supported"
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2):
        return "the attention mask is not of shape (batch, tokens)"
    for name in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if name not in call and name not in supported and getattr(config, name, False):
            return f"{name}, which the model's configuration sets, is not supported"
    return None


def why_not_in_chunks(model: Model, call: Mapping[str, Any]) -> str | None:
    """Why this call, given by its named arguments, must run whole; None if it can be chunked."""
    module = hugging_face_module(model)
    name = getattr(module, "__name__", None) or type(module).__name__
    if "past_key_values" not in forward_parameters(model):
        return f"{name} takes no past_key_values"
    if not is_transformers_model(module):
        return f"{name} has no configuration of transformers"
    config = module.config.get_text_config()
    if (reason := why_not_supported(module, config, call, _CHUNK_ARGUMENTS)) is not None:
        return reason
    positions = call.get("position_ids")
    # Without a cache and a mask, positions that do not rise one by one mean several texts packed into one row.
    if positions is not None and not {"attention_mask", "past_key_values"} & call.keys() and not _is_rising(positions):
        return "several texts are packed into one row"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        # A chunk's end decides how its positions are rotated: chunks would not equal the whole.
        short = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if num_known_tokens(call) > short:
            return f"{rope['rope_type']} rotates positions by the length of the whole input beyond {short:,} tokens"
    return None


def _is_rising(positions: Tensor) -> bool:
    return bool((positions.diff(dim=-1) == 1).all())


def num_cached_tokens(call: Mapping[str, Any]) -> int:
    """Tokens in the call's cache before it runs."""
    cache = call.get("past_key_values")
    return 0 if cache is None else int(cache.get_seq_length())


def num_known_tokens(call: Mapping[str, Any]) -> int:
    """Tokens in the call's cache after it has run."""
    return num_cached_tokens(call) + input_shape((), call)[1]
