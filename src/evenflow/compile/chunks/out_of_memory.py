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

    Layers that grow are cut to their old length, since a copy would double their memory. Only windows, which are
    short, are kept. `why_lost` says why another kind of cache cannot be taken back.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._restores: list[Callable[[], None]] = []
        self.why_lost: str | None = None
        if not hasattr(cache, "layers") or getattr(cache, "offloading", False):
            self.why_lost = f"what the call left in {type(cache).__name__} cannot be taken back"
            return
        for layer in cache.layers:
            if (how_to_save := _HOW_TO_SAVE.get(type(layer))) is None:
                self.why_lost = f"what the call left in {type(layer).__name__} cannot be taken back"
                return
            self._restores.append(how_to_save(layer))

    def restore(self) -> None:
        del self._cache.layers[len(self._restores) :]  # some caches add layers as they are filled
        for restore in self._restores:
            restore()


def _save_growing(layer: Any) -> Callable[[], None]:
    was_initialized, length = layer.is_initialized, layer.get_seq_length()

    def restore() -> None:
        layer.is_initialized = was_initialized
        if not was_initialized:
            layer.keys = layer.values = None
        elif layer.keys.ndim > 1:  # it has held tokens
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    return restore


def _save_moving_window(layer: Any) -> Callable[[], None]:
    kept = layer.is_initialized, layer.keys, layer.values, layer.cumulative_length

    def restore() -> None:
        layer.is_initialized, layer.keys, layer.values, layer.cumulative_length = kept

    return restore


def _save_static(layer: Any) -> Callable[[], None]:
    """What lies beyond its length is masked and overwritten."""
    length = layer.cumulative_length.clone()
    return lambda: layer.cumulative_length.copy_(length)


def _save_static_window(layer: Any) -> Callable[[], None]:
    restore_length, num_seen = _save_static(layer), layer.cumulative_length_int
    kept = (layer.keys.clone(), layer.values.clone()) if num_seen else None

    def restore() -> None:
        restore_length()
        layer.cumulative_length_int = num_seen
        if kept is not None:
            layer.keys.copy_(kept[0])
            layer.values.copy_(kept[1])

    return restore


_HOW_TO_SAVE: dict[type, Callable[[Any], Callable[[], None]]] = {
    DynamicLayer: _save_growing,
    DynamicSlidingWindowLayer: _save_moving_window,
    StaticLayer: _save_static,
    StaticSlidingWindowLayer: _save_static_window,
}
