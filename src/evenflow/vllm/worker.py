"""A worker class for vLLM that computes the logits of every batch size once, before the first request.

CUDA loads a kernel when it is first launched, and waits for the whole device meanwhile. The output layer has a kernel
for every few batch sizes, so without this each new record of streams makes all of them wait for one step more.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

logger = init_logger("vllm.evenflow")

_BASE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_Worker: type[Any] = resolve_obj_by_qualname(_BASE)


class WarmWorker(_Worker):  # type: ignore[misc]
    """What `--worker-cls` names."""

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        started = time.perf_counter()
        num_sizes = self._warm_up_logits()
        logger.info("evenflow: logits of %d batch sizes in %.1f s", num_sizes, time.perf_counter() - started)
        return result

    @torch.inference_mode()
    def _warm_up_logits(self) -> int:
        runner, config = self.model_runner, self.vllm_config
        if config.model_config.runner_type != "generate" or not getattr(runner, "is_last_pp_rank", True):
            return 0
        num_sizes: int = min(config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens)
        shape = num_sizes, config.model_config.get_hidden_size()
        hidden = torch.zeros(shape, dtype=config.model_config.dtype, device=self.device)
        for size in range(num_sizes, 0, -1):
            runner.model.compute_logits(hidden[:size])
        return num_sizes
