"""Records a model's decoding step as a CUDA graph and replays it: one launch instead of hundreds.

A graph holds addresses, so it serves one static cache.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import StaticCache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import create_masks_for_generate

from evenflow.compile.model_call import STEP_ARGUMENTS, Model
from evenflow.compile.model_interface import FasterModel

logger = logging.getLogger("evenflow")

_WARM_UP_STEPS = 3  # in which kernels choose their algorithms and libraries allocate their workspaces


class GraphedModel(FasterModel):
    """Replays steps of one token over a static cache; other calls run in `inner_model`.

    `step` runs the same step kernel by kernel: the model itself or a compiled form of it. `generate` uses a static
    cache by default.
    """

    faster_kind = "replayed"

    def __init__(self, model: Model, step: Model) -> None:
        super().__init__(model)
        self._step = step
        self._graph: _Graph | None = None
        self.why_no_graphs = _why_no_graph(self.wrapped_module)
        self.num_replays = 0

    def run_faster(self, call: dict[str, Any]) -> Any:
        if self.why_no_graphs is not None or not _is_decode(call):
            return None
        call = self._with_fixed_mask(call)
        output = None if self._graph is None else self._graph.replay(call)
        if output is None:
            self._graph = None  # frees its memory before the next one allocates
            try:
                self._graph = _Graph(self._step, call)
            except Exception as error:  # the step can always run without a graph
                self.why_no_graphs = f"recording failed: {error}"
                logger.warning("No CUDA graphs: %s.", self.why_no_graphs)
                return None
            output = self._graph.replay(call)
        self.num_replays += 1
        return output

    def generation_defaults(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        defaults = super().generation_defaults(kwargs)
        if self.why_no_graphs is not None or "past_key_values" in kwargs or kwargs.get("num_beams", 1) > 1:
            return defaults
        return {**defaults, "cache_implementation": "static", "disable_compile": True}

    def _with_fixed_mask(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with a mask over the whole cache: one of (batch, tokens) grows from step to step."""
        mask = call.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            return call
        module, tokens = self.wrapped_module, call["input_ids"]
        fixed = create_masks_for_generate(
            config=module.config,
            inputs_embeds=torch.empty((*tokens.shape, 0), dtype=module.dtype, device=tokens.device),
            attention_mask=mask,
            past_key_values=call["past_key_values"],
            position_ids=call.get("position_ids"),
        )
        return {**call, "attention_mask": fixed}


def _why_no_graph(module: Any) -> str | None:
    if next(module.parameters()).device.type != "cuda":
        return "the model is not on a CUDA device"
    layers = StaticCache(config=module.config.get_text_config(), max_cache_len=8).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}
    return f"its cache has layers that move ({', '.join(sorted(kinds))})" if kinds else None


def _is_decode(call: Mapping[str, Any]) -> bool:
    tokens, cache = call.get("input_ids"), call.get("past_key_values")
    return (
        tokens is not None
        and tokens.ndim == 2
        and tokens.shape[1] == 1
        and cache is not None
        and all(type(layer) is StaticLayer and layer.is_initialized for layer in cache.layers)
        and all(name in STEP_ARGUMENTS or value is False for name, value in call.items())
        and call.get("return_dict", True)
        and not torch.is_grad_enabled()
    )


class _Graph:
    """One recorded step, its inputs and outputs at fixed addresses."""

    def __init__(self, step: Callable[..., Any], call: dict[str, Any]) -> None:
        cache = call["past_key_values"]
        self._cache = weakref.ref(cache)
        self._addresses = _addresses(cache)
        leaves, self._structure = _flatten(call)
        self._inputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        fixed_call = {**pytree.tree_unflatten(self._inputs, self._structure), "past_key_values": cache}
        lengths = [layer.cumulative_length.clone() for layer in cache.layers]

        def rewind() -> None:  # a trial step must not lengthen the cache
            for layer, length in zip(cache.layers, lengths, strict=True):
                layer.cumulative_length.copy_(length)

        try:
            self._record(step, fixed_call, rewind)
        finally:
            rewind()

    def _record(self, step: Callable[..., Any], call: dict[str, Any], rewind: Callable[[], None]) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                step(**call)
                rewind()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            output = step(**call)
        # The output itself would keep the cache alive.
        self._output_class, self._logits = type(output), output.logits

    def replay(self, call: dict[str, Any]) -> Any:
        """The step's output, or None if this graph is for another cache or for inputs of other shapes."""
        cache, (leaves, structure) = call["past_key_values"], _flatten(call)
        is_same_cache = self._cache() is cache and _addresses(cache) == self._addresses
        if not is_same_cache or structure != self._structure or not all(map(_is_alike, leaves, self._inputs)):
            return None
        for fixed, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(fixed, Tensor):
                fixed.copy_(leaf)
        self._graph.replay()
        # Cloned, since the next replay overwrites it.
        return self._output_class(logits=self._logits.clone(), past_key_values=cache)


def _flatten(call: dict[str, Any]) -> tuple[list[Any], Any]:
    return pytree.tree_flatten({name: value for name, value in call.items() if name != "past_key_values"})


def _is_alike(leaf: Any, fixed: Any) -> bool:
    if isinstance(fixed, Tensor):
        return isinstance(leaf, Tensor) and leaf.shape == fixed.shape and leaf.dtype == fixed.dtype
    return bool(leaf == fixed)


def _addresses(cache: Any) -> list[int]:
    return [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]
