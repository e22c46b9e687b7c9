"""Runs a compiled step graph over the caches that transformers uses, with the weights of the model in memory.

Must not know: how the graph was compiled, or which calls it is for.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from evenflow.compile.aot.step_graph import StepGraph
from evenflow.errors import UnsupportedModel

_ALIGNED_BYTES = 16  # kernels for CUDA read so many at a time


class StepRunner:
    """One step of the model: `run` gives logits, and the cache grows in place.

    `cache` is one that the model filled: an empty one does not tell how many heads a layer has.
    """

    def __init__(self, graph: StepGraph, package: Path, lifted: Mapping[str, Tensor], cache: Any) -> None:
        device_index = cache.layers[0].keys.device.index
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = torch._inductor.aoti_load_package(
                str(package), device_index=-1 if device_index is None else device_index
            )
        tensors = {**dict(graph.named_parameters(remove_duplicate=False)), **dict(graph.named_buffers()), **lifted}
        names = compiled.get_constant_fqns()
        if missing := [name for name in names if name not in tensors]:
            raise UnsupportedModel(f"the package wants tensors that the model does not have: {', '.join(missing)}")
        # The loader keeps pointers, so that whoever runs it must keep the tensors.
        self._tensors = {name: tensors[name].detach() for name in names}
        compiled.load_constants(self._tensors, check_full_update=True, user_managed=True)
        self._loader: Any = compiled.loader  # the callable above it parses the shape of its arguments at each call
        self._takes_positions = graph.takes_positions
        self._config = graph.module.config
        self._layer_is_sliding = graph.layer_is_sliding
        self._empty = [tensor[:1, :, :0].clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]

    def run(
        self, input_ids: Tensor, mask: Tensor, positions: Tensor | None, logit_rows: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        kv = self._tensors_of(cache, input_ids.shape[0])
        inputs = [input_ids, mask, logit_rows]
        if self._takes_positions and positions is not None:
            inputs.append(positions)
        logits, *new_kv = self._loader.boxed_run([_as_compiled(tensor) for tensor in (*inputs, *kv)])
        self._fill(cache, new_kv, input_ids.shape[1])
        return logits, cache

    def new_cache(self) -> Any:
        """An empty cache of the kind that the model itself would make."""
        return DynamicCache(config=self._config)

    def can_run(self, cache: Any) -> bool:
        """Whether a cache is of the kind that the graph was made for."""
        layers = getattr(cache, "layers", ())
        return len(layers) == len(self._layer_is_sliding) and all(
            type(layer) is (DynamicSlidingWindowLayer if is_sliding else DynamicLayer)
            and not getattr(layer, "record_past", False)
            for layer, is_sliding in zip(layers, self._layer_is_sliding, strict=True)
        )

    def _tensors_of(self, cache: Any, num_sequences: int) -> list[Tensor]:
        if cache.get_seq_length() == 0:
            return [tensor.expand(num_sequences, -1, -1, -1) for tensor in self._empty]
        return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]

    def _fill(self, cache: Any, kv: list[Tensor], num_new: int) -> None:
        for layer, keys, values in zip(cache.layers, kv[::2], kv[1::2], strict=True):
            if not layer.is_initialized:
                layer.lazy_initialization(keys, values)
            if type(layer) is DynamicSlidingWindowLayer:
                layer.cumulative_length += num_new
                keys, values = (tensor[:, :, -layer.sliding_window + 1 :, :] for tensor in (keys, values))
            layer.keys, layer.values = keys, values


def _as_compiled(tensor: Tensor) -> Tensor:
    """The tensor as the graph's kernels read it: a part of another one may start anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNED_BYTES == 0 else tensor.clone()
