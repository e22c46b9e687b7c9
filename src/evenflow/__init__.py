"""evenflow serves language models so that no stream stalls.

    from evenflow import LLM, SamplingParams

Names are imported when first used: `import evenflow` alone loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenflow.config import EngineConfig
    from evenflow.core.grammar import Grammar
    from evenflow.core.request import SamplingParams
    from evenflow.core.service_classes import ServiceClass
    from evenflow.engine.async_llm import AsyncLLM
    from evenflow.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "Grammar", "SamplingParams", "ServiceClass"]

_HOMES = {
    "LLM": "evenflow.engine.llm",
    "AsyncLLM": "evenflow.engine.async_llm",
    "EngineConfig": "evenflow.config",
    "Grammar": "evenflow.core.grammar",
    "SamplingParams": "evenflow.core.request",
    "ServiceClass": "evenflow.core.service_classes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'evenflow' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
