"""A causal language model's step as one graph of tensors: tokens and a KV cache in, logits and a longer cache out.

It is exported once for all batch sizes, lengths and contexts. AOTInductor compiles it into a package without weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from evenflow.compile.model_call import forward_parameters
from evenflow.errors import UnsupportedModel

# All different, and none 0 or 1: the graph would be specialised to equal sizes, and to those values.
_EXAMPLE_BATCH, _EXAMPLE_TOKENS, _EXAMPLE_CONTEXT = 2, 5, 7
_MAX_LIFTED_VALUES = 65536

_OPTIONS = {
    # The package runs with the model's weights in memory, so it is small and makes no second copy. Inductor's own CPU
    # kernels for matrix products, which tuning would try, need repacked copies.
    "aot_inductor.package_constants_in_so": False,
    "max_autotune_gemm_backends": "ATEN,TRITON",
    # Fused operations round where the model's own would: its tokens stay the same in bfloat16 too (on a CPU since
    # torch 2.13).
    "emulate_precision_casts": True,
}


class _GraphLayer(DynamicLayer):  # type: ignore[misc]
    """A layer's cache within the graph: whatever its kind outside, a step appends to the given tensors."""

    def __init__(self, keys: Tensor, values: Tensor, num_seen: int, is_sliding: bool) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device = keys.dtype, keys.device
        self.num_seen = num_seen
        self.is_sliding = is_sliding
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        num_held = self.keys.shape[-2]
        return num_held + query_length, self.num_seen - num_held


class StepGraph(nn.Module):
    """The model's step as a function of tensors. `rest`: positions if the model takes them, then keys and values."""

    def __init__(self, module: Any, layer_is_sliding: Sequence[bool]) -> None:
        super().__init__()
        self.module = module
        self.layer_is_sliding = tuple(layer_is_sliding)
        self.takes_positions = "position_ids" in forward_parameters(module)

    def forward(self, input_ids: Tensor, mask: Tensor, logit_rows: Tensor, *rest: Tensor) -> list[Tensor]:
        positions, kv = ({"position_ids": rest[0]}, rest[1:]) if self.takes_positions else ({}, rest)
        num_seen = mask.shape[1] - input_ids.shape[1]
        cache = DynamicCache()
        cache.layers = [
            _GraphLayer(keys, values, num_seen, is_sliding)
            for keys, values, is_sliding in zip(kv[::2], kv[1::2], self.layer_is_sliding, strict=True)
        ]
        output = self.module(
            input_ids=input_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            return_dict=True,
            logits_to_keep=logit_rows,
            **positions,
        )
        return [output.logits, *(tensor for layer in cache.layers for tensor in (layer.keys, layer.values))]


def layers_are_sliding(cache: Any) -> tuple[bool, ...]:
    """Which layers of a dynamic cache keep only a window; UnsupportedModel for other kinds of cache."""
    kinds = [type(layer) for layer in getattr(cache, "layers", [])]
    unknown = {kind.__name__ for kind in kinds if kind not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if unknown or not kinds:
        raise UnsupportedModel(f"its cache is of {', '.join(sorted(unknown)) or type(cache).__name__}")
    return tuple(kind is DynamicSlidingWindowLayer for kind in kinds)


def export_step(graph: StepGraph, cache: Any) -> torch.export.ExportedProgram:
    """The graph for any batch size, length and context. `cache` is one that the model filled, for its shapes."""
    if "logits_to_keep" not in forward_parameters(graph.module):
        raise UnsupportedModel(f"{type(graph.module).__name__}.forward takes no logits_to_keep")
    dynamic = torch.export.Dim.DYNAMIC
    inputs = _example_inputs(graph, cache)
    by_token, kv = {0: dynamic, 1: dynamic}, {0: dynamic, 2: dynamic}
    positions = [by_token] if graph.takes_positions else []
    rest = (*positions, *[kv] * (len(inputs) - 3 - len(positions)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates parts that it uses itself
        return torch.export.export(
            graph, tuple(inputs), dynamic_shapes=(by_token, by_token, {0: dynamic}, rest), strict=False
        )


def _example_inputs(graph: StepGraph, cache: Any) -> list[Tensor]:
    device = cache.layers[0].keys.device
    tokens = torch.ones(_EXAMPLE_BATCH, _EXAMPLE_TOKENS, dtype=torch.long, device=device)
    mask = torch.ones(_EXAMPLE_BATCH, _EXAMPLE_CONTEXT + _EXAMPLE_TOKENS, dtype=torch.bool, device=device)
    inputs = [tokens, mask, torch.tensor([0, 2, 4], device=device)]
    if graph.takes_positions:
        inputs.append((torch.arange(_EXAMPLE_TOKENS, device=device) + _EXAMPLE_CONTEXT).repeat(_EXAMPLE_BATCH, 1))
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            _, num_heads, _, head_dim = tensor.shape
            inputs.append(tensor.new_zeros(_EXAMPLE_BATCH, num_heads, _EXAMPLE_CONTEXT, head_dim))
    return inputs


def lifted_constants(graph: StepGraph, program: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """Tensors that the model creates while it runs; they belong to the package."""
    weights = {**dict(graph.named_parameters()), **dict(graph.named_buffers())}
    lifted = {
        name: value for name, value in program.constants.items() if isinstance(value, Tensor) and name not in weights
    }
    if sum(value.numel() for value in lifted.values()) > _MAX_LIFTED_VALUES:
        raise UnsupportedModel("it creates large tensors while it runs")
    return lifted


def compile_step(program: torch.export.ExportedProgram, path: Path, options: dict[str, Any]) -> None:
    """Write the compiled graph to `path`, which ends in .pt2."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(path), inductor_configs={**_OPTIONS, **options}
        )
