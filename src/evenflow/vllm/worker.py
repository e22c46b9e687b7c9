"""A worker class for vLLM that runs what is compiled or loaded at its first use before the first request.

vLLM's graphs contain the kernels of small steps, but neither the output layer's nor those of larger steps: matrix
products (see `warm_products`), and Triton's, such as those of experts, which compile for up to 1.6 s.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from evenflow.best_effort import BestEffort
from evenflow.model.cuda.warm_products import warm_up, warm_up_logits
from evenflow.vllm.graphs import uncaptured_rows, uncaptured_steps

logger = init_logger("vllm.evenflow")

_BASE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_Worker: type[Any] = resolve_obj_by_qualname(_BASE)


class WarmWorker(_Worker):  # type: ignore[misc]
    """What `--worker-cls` names."""

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        best_effort = BestEffort(logger)
        best_effort.run("warming up the output layer", self._warm_up_output_layer, None)
        best_effort.run("warming up matrix products", partial(self._warm_up_products, best_effort), None)
        best_effort.run("warming up steps without a graph", self._warm_up_steps, None)
        return result

    def _warm_up_output_layer(self) -> None:
        runner, config = self.model_runner, self.vllm_config
        if config.model_config.runner_type == "generate" and getattr(runner, "is_last_pp_rank", True):
            most = min(config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens)
            shape = most, config.model_config.get_hidden_size()
            hidden = torch.zeros(shape, dtype=config.model_config.dtype, device=self.device)
            logger.info(warm_up_logits(runner.model.compute_logits, hidden))

    def _warm_up_products(self, best_effort: BestEffort) -> None:
        config = self.vllm_config
        graph_sizes = config.compilation_config.cudagraph_capture_sizes or ()
        rows = uncaptured_rows(graph_sizes, config.scheduler_config.max_num_batched_tokens)
        if rows and not current_platform.is_cpu():
            layers = [layer for layer in self.model_runner.model.modules() if is_library_product(layer)]
            logger.info(warm_up_products(layers, rows, best_effort))

    def _warm_up_steps(self) -> None:
        config = self.vllm_config
        graph_sizes = config.compilation_config.cudagraph_capture_sizes or ()
        sizes = uncaptured_steps(graph_sizes, config.scheduler_config.max_num_batched_tokens)
        if sizes and not current_platform.is_cpu():
            started = time.perf_counter()
            for rows in sizes:
                self.model_runner._dummy_run(rows, skip_eplb=True)
            torch.accelerator.synchronize()
            seconds = time.perf_counter() - started
            logger.info(
                "evenflow: %d steps of up to %d rows without a graph, in %.1f s", len(sizes), sizes[-1], seconds
            )


def is_library_product(layer: torch.nn.Module) -> bool:
    """Hybrid models keep the weights of their convolutions, which have three dimensions, in such layers too."""
    if not (isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod)):
        return False
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def warm_up_products(layers: Iterable[Any], sizes: Sequence[int], best_effort: BestEffort) -> str:
    """Of one layer of each shape, with each of these numbers of rows; returns a line for the log."""
    of_each_shape = {(layer.weight.shape, layer.weight.dtype): layer for layer in layers}

    def seconds_of(layer: Any) -> float | None:
        rows = layer.weight.new_zeros(max(sizes), layer.weight.shape[1])
        return warm_up([(partial(layer.quant_method.apply, layer), rows)], sizes)

    name = "warming up products with a weight of"
    seconds = [
        best_effort.run(f"{name} {' x '.join(map(str, shape))}", partial(seconds_of, layer), None)
        for (shape, _), layer in of_each_shape.items()
    ]
    warmed = [one for one in seconds if one is not None]
    return f"evenflow: {len(warmed)} matrix products, each of {len(sizes)} numbers of rows, in {sum(warmed):.1f} s"
