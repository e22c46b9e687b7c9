"""evenflow's latency target inside vLLM, and all that starts and explains vLLM. Nothing here imports vLLM by itself."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """`--scheduler-cls evenflow.vllm.LatencyTargetScheduler`: only vLLM, asking for it, pays for its import."""
    if name == "LatencyTargetScheduler":
        from evenflow.vllm.plugin import LatencyTargetScheduler

        return LatencyTargetScheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
