"""Runs SGLang's output layer before the first request (see `warm_products`): graphs contain it for decodes only."""

from __future__ import annotations

import logging
from typing import Any

import torch

from evenflow.model.cuda.warm_products import warm_up_logits

_MOST_SIZES = 512  # rows of logits: of more there is too little memory beside SGLang's pool

logger = logging.getLogger("sglang.evenflow")


def warm_up_output_layer(scheduler: Any) -> None:
    """On a GPU, for models whose logits come from an output layer of the usual names."""
    runner = scheduler.tp_worker.model_runner
    processor, layer = (getattr(runner.model, name, None) for name in ("logits_processor", "lm_head"))
    if runner.device == "cpu" or processor is None or layer is None:
        return
    shape = min(scheduler.max_running_requests, _MOST_SIZES), scheduler.model_config.hidden_size
    hidden = torch.zeros(shape, dtype=runner.dtype, device=runner.device)
    logger.info(warm_up_logits(lambda rows: processor._compute_lm_head(rows, layer), hidden))
