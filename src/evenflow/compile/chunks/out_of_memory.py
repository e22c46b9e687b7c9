"""Detects that a call ran out of memory and removes what it left in the KV cache, so that a shorter one can follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from evenflow.compile.model_call import Model, named_arguments

# CUDA raises a class of its own. What other allocators raise has only its text in common.
_MESSAGES = ("out of memory", "not enough memory", "can't allocate memory", "alloc_failed")


@dataclass(frozen=True, slots=True)
class RanOut:
    """A call that ran out of memory, with the allocator's message. The cache is as it was before."""

    message: str


def attempt(model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any], why_final: Callable[[], str | None]) -> Any:
    """The output of a call, or RanOut if it ran out of memory and a shorter call can follow.

    Other errors are raised, and so is this one if `why_final` has a reason, or if the cache cannot be taken back.
    """
    named = named_arguments(model, args, kwargs) if len(args) > 1 else kwargs
    cache = named.get("past_key_values")
    before = None if cache is None else SavedCache(cache)
    try:
        return model(*args, **kwargs)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        if (reason := why_final() or (before and before.why_lost)) is not None:
            error.add_note(f"No smaller chunks can follow: {reason}.")
            raise
        message = next(iter(str(error).strip().splitlines()), type(error).__name__)
    # Only here, after the handler, is the traceback gone that kept the failed call's tensors alive.
    if before is not None:
        before.restore()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return RanOut(message)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(message in text for message in _MESSAGES)


class SavedCache:
    """The state of a transformers cache, to go back to after a call that failed half way.

    `why_lost` says why another kind of cache cannot be taken back.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        is_known = hasattr(cache, "layers") and not getattr(cache, "offloading", False)
        odd = next((layer for layer in cache.layers if type(layer) not in _LAYERS), None) if is_known else cache
        self.why_lost = None if odd is None else f"what the call left in {type(odd).__name__} cannot be taken back"
        self._restores = [] if self.why_lost else [_saved(layer) for layer in cache.layers]

    def restore(self) -> None:
        del self._cache.layers[len(self._restores) :]  # some caches add layers as they are filled
        for restore in self._restores:
            restore()


_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def _saved(layer: Any) -> Callable[[], None]:
    """A function that takes a layer back to its state of now."""
    state, kind = dict(vars(layer)), type(layer)
    grows = kind is DynamicLayer and layer.get_seq_length() > 0
    length = layer.get_seq_length() if grows else None
    if grows:  # its tensors are cut to their old length, since to keep these too would double the memory
        del state["keys"], state["values"]
    # Static layers are written in place. What lies beyond the length is masked and overwritten, except in a window.
    overwritten = ("cumulative_length",) if kind is StaticLayer else ("cumulative_length", "keys", "values")
    names = overwritten if isinstance(layer, StaticLayer) else ()
    copies = {name: state[name].clone() for name in names if state[name] is not None}

    def restore() -> None:
        vars(layer).update(state)
        for name, copy in copies.items():
            state[name].copy_(copy)
        if grows:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    return restore
