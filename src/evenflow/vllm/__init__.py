"""evenflow's latency target inside vLLM, and how vLLM is started. Importing this package does not import vLLM."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """For `--scheduler-cls` and `--worker-cls`, imported only inside vLLM."""
    if name == "LatencyTargetScheduler":
        from evenflow.vllm.plugin import LatencyTargetScheduler

        return LatencyTargetScheduler
    if name == "WarmWorker":
        from evenflow.vllm.worker import WarmWorker

        return WarmWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
