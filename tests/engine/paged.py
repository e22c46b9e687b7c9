"""A model on the executor for GPUs, which runs on the CPU too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from evenflow import LLM
from evenflow.config import EngineConfig
from evenflow.engine.build import build_engine
from evenflow.engine.placement import place_paged


def paged_llm(model: str | Path, **settings: Any) -> LLM:
    """With two steps in flight and 400 blocks of memory for a tiny model, unless stated."""
    defaults: dict[str, Any] = {"max_steps_in_flight": 2, "kv_cache_memory": 400 * tiny_block_bytes()}
    config = EngineConfig(model=str(model), device="cpu", **{**defaults, **settings})
    built = build_engine(config, place=partial(place_paged, device=torch.device("cpu")))
    llm = LLM.over(built.engine, built.intake)
    llm.tokenizer, llm.config = built.tokenizer, built.config
    return llm


def tiny_block_bytes() -> int:
    """Of `tiny_llama`: 16 tokens, 4 layers, 2 KV heads of 16, in float32."""
    return 16 * 4 * 2 * 2 * 16 * 4
