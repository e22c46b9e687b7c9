"""A transformers model that runs compiled where it can, and plain where it cannot: same call, same answer."""

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
from evenflow.compile.model_call import STEP_ARGUMENTS, Model, why_not_supported
from evenflow.compile.model_interface import FasterModel
from evenflow.compile.monitoring import warn_once_about
from evenflow.errors import UnsupportedModel

_ALIGNMENT_BYTES = 16  # CUDA kernels read this many at a time


class StepRunner:
    """Loads a compiled step graph and runs it on transformers' caches, with the weights of the model in memory.

    `cache` is one that the model filled: an empty one does not show how many heads a layer has.
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
        self._tensors = {name: tensors[name].detach() for name in names}  # the loader keeps pointers to these
        compiled.load_constants(self._tensors, check_full_update=True, user_managed=True)
        self._loader: Any = compiled.loader  # calling `compiled` itself would parse its arguments' shapes each time
        self._graph = graph
        self._empty = [tensor[:1, :, :0].clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]

    def run(self, input_ids: Tensor, mask: Tensor, positions: Tensor, logit_rows: Tensor, cache: Any) -> Tensor:
        """The logits of one step; the cache grows in place."""
        kv = self._tensors_of(cache, input_ids.shape[0])
        inputs = [input_ids, mask, logit_rows, *([positions] if self._graph.takes_positions else [])]
        outputs: list[Tensor] = self._loader.boxed_run([_aligned(tensor) for tensor in (*inputs, *kv)])
        self._fill(cache, outputs[1:], input_ids.shape[1])
        return outputs[0]

    def supports(self, cache: Any) -> bool:
        """Whether a cache is of the kind that the graph was compiled for."""
        layers = getattr(cache, "layers", ())
        return len(layers) == len(self._graph.layer_is_sliding) and all(
            type(layer) is (DynamicSlidingWindowLayer if is_sliding else DynamicLayer)
            and not getattr(layer, "record_past", False)
            for layer, is_sliding in zip(layers, self._graph.layer_is_sliding, strict=True)
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


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor as the kernels read it: a slice of another tensor may start anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT_BYTES == 0 else tensor.clone()


class CompiledModel(FasterModel):
    """Runs calls that the compiled step does not support in the plain model, and logs each reason once.

    `counts_padding`: whether the model counts padding when it derives positions from the mask, as most models do.
    """

    faster_kind = "compiled"

    def __init__(self, model: Model, runner: StepRunner, output_class: Any, *, counts_padding: bool) -> None:
        super().__init__(model)
        self._runner = runner
        self._counts_padding = counts_padding
        self._weight = next(self.wrapped_module.parameters())
        self._device, self._address = self._weight.device, self._weight.data_ptr()
        self._output_class = output_class
        self._warn = warn_once_about("A call runs in the plain model, not in the compiled one")

    def run_faster(self, call: dict[str, Any]) -> Any:
        if (reason := self._why_not_compiled(call)) is not None:
            self._warn(reason)
            return None
        tokens: Tensor = call["input_ids"]
        num_sequences, num_new = tokens.shape
        cache = call.get("past_key_values")
        if cache is None:
            cache = DynamicCache(config=self.wrapped_module.config)
        mask = call.get("attention_mask")
        if mask is None:
            num_known = int(cache.get_seq_length()) + num_new
            mask = torch.ones(num_sequences, num_known, dtype=torch.bool, device=self._device)
        else:
            mask = mask.to(torch.bool)
        positions = call.get("position_ids")
        if positions is None:
            positions = self._positions(mask)[:, -num_new:]
        rows = _logit_rows(call.get("logits_to_keep"), num_new, self._device)
        logits = self._runner.run(tokens, mask, positions.expand(num_sequences, -1), rows, cache)
        config = self.wrapped_module.config
        keep_cache = call.get("use_cache", getattr(config, "use_cache", True))
        output = self._output_class(logits=logits, past_key_values=cache if keep_cache else None)
        return output if call.get("return_dict", config.return_dict) else output.to_tuple()

    def _why_not_compiled(self, call: Mapping[str, Any]) -> str | None:
        tokens, cache = call.get("input_ids"), call.get("past_key_values")
        if tokens is None or tokens.ndim != 2 or tokens.device != self._device:
            return "it is not called with input_ids of shape (batch, tokens) on the model's device"
        if cache is not None and not self._runner.supports(cache):
            return f"{type(cache).__name__} is not the kind of cache that the model makes itself"
        if self._weight.data_ptr() != self._address:
            return "the weights were moved after compilation"
        return why_not_supported(self.wrapped_module, self.wrapped_module.config, call, STEP_ARGUMENTS)

    def _positions(self, mask: Tensor) -> Tensor:
        if self._counts_padding:
            return torch.arange(mask.shape[1], device=mask.device).repeat(mask.shape[0], 1)
        return (mask.cumsum(-1) - 1) * mask


def _logit_rows(logits_to_keep: int | Tensor | None, num_tokens: int, device: torch.device) -> Tensor:
    rows = torch.arange(num_tokens, device=device)
    if isinstance(logits_to_keep, Tensor):
        return rows[logits_to_keep.to(device)]
    return rows[-logits_to_keep:] if logits_to_keep else rows
