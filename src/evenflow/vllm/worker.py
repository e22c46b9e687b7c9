"""A worker class for vLLM that runs matrix products before the first request: see `warm_products`.

vLLM's graphs contain the products of small steps, but neither the output layer's nor those of larger steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from evenflow.model.cuda.warm_products import warm_up, warm_up_logits
from evenflow.vllm.graphs import uncaptured_rows

logger = init_logger("vllm.evenflow")

_BASE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_Worker: type[Any] = resolve_obj_by_qualname(_BASE)


class WarmWorker(_Worker):  # type: ignore[misc]
    """What `--worker-cls` names."""

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        runner, config = self.model_runner, self.vllm_config
        budget = config.scheduler_config.max_num_batched_tokens
        if config.model_config.runner_type == "generate" and getattr(runner, "is_last_pp_rank", True):
            shape = min(config.scheduler_config.max_num_seqs, budget), config.model_config.get_hidden_size()
            hidden = torch.zeros(shape, dtype=config.model_config.dtype, device=self.device)
            logger.info(warm_up_logits(runner.model.compute_logits, hidden))
        rows = uncaptured_rows(config.compilation_config.cudagraph_capture_sizes or (), budget)
        if rows and not current_platform.is_cpu():
            layers = [layer for layer in runner.model.modules() if is_library_product(layer)]
            logger.info(warm_up_products(layers, rows, config.model_config.dtype, self.device))
        return result


def is_library_product(layer: torch.nn.Module) -> bool:
    return isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)


def warm_up_products(
    layers: Iterable[Any], sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None
) -> str:
    """Of one layer of each shape, with each of these numbers of rows; returns a line for the log."""
    of_each_shape = {(layer.input_size, layer.output_size, type(layer)): layer for layer in layers}

    def rows_of(layer: Any) -> Tensor:
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        return torch.zeros(max(sizes), width, dtype=dtype, device=device)

    products = ((partial(layer.quant_method.apply, layer), rows_of(layer)) for layer in of_each_shape.values())
    seconds = warm_up(products, sizes)
    return f"evenflow: {len(of_each_shape)} matrix products, each of {len(sizes)} numbers of rows, in {seconds:.1f} s"
