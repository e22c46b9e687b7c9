"""A worker class for vLLM that has CUDA load the kernels of matrix products before the first request.

CUDA loads a kernel when it is first launched, and waits for the whole device meanwhile. Libraries have another one for
every few numbers of rows. vLLM's graphs hold those of small steps, but neither the output layer's nor those of larger
steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from evenflow.model.cuda.warm_logits import warm_up_logits
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
        if not current_platform.is_cpu():
            layers = [layer for layer in runner.model.modules() if is_library_product(layer)]
            rows = uncaptured_rows(config.compilation_config.cudagraph_capture_sizes or (), budget)
            line = warm_up_products(layers, rows, config.model_config.dtype, self.device)
            torch.accelerator.synchronize()
            logger.info(line)
        return result


def is_library_product(layer: torch.nn.Module) -> bool:
    return isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)


@torch.inference_mode()
def warm_up_products(
    layers: Iterable[Any], sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None
) -> str:
    """Of one layer of each shape, with each of these numbers of rows; returns a line for the log."""
    started = time.perf_counter()
    of_each_shape = {(layer.input_size, layer.output_size, type(layer)): layer for layer in layers}
    for layer in of_each_shape.values():
        width = getattr(layer, "input_size_per_partition", layer.input_size)
        rows = torch.zeros(max(sizes, default=0), width, dtype=dtype, device=device)
        for size in sizes:
            layer.quant_method.apply(layer, rows[:size])
    seconds = time.perf_counter() - started
    return f"evenflow: {len(of_each_shape)} matrix products, each of {len(sizes)} numbers of rows, in {seconds:.1f} s"
