"""A worker class for vLLM that computes the logits of every batch size once, before the first request."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from evenflow.model.cuda.warm_logits import warm_up_logits

logger = init_logger("vllm.evenflow")

_BASE = "vllm.v1.worker.cpu_worker.CPUWorker" if current_platform.is_cpu() else "vllm.v1.worker.gpu_worker.Worker"
_Worker: type[Any] = resolve_obj_by_qualname(_BASE)


class WarmWorker(_Worker):  # type: ignore[misc]
    """What `--worker-cls` names."""

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        runner, config = self.model_runner, self.vllm_config
        if config.model_config.runner_type == "generate" and getattr(runner, "is_last_pp_rank", True):
            num_sizes = min(config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens)
            shape = num_sizes, config.model_config.get_hidden_size()
            hidden = torch.zeros(shape, dtype=config.model_config.dtype, device=self.device)
            logger.info(warm_up_logits(runner.model.compute_logits, hidden))
        return result
