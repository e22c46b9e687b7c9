"""A step as the plug-in tells evenflow's front of it: the server's own StepEvent, and which requests came and went.

Must not know: sockets, vLLM's classes. Needs msgspec, which vLLM brings along.
"""

from __future__ import annotations

import msgspec

from evenflow.server.metrics.events import StepEvent


class RequestArrived(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    at: float  # of `time.perf_counter`, like a step's times
    num_prompt_tokens: int
    max_tokens: int


class RequestLeft(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended, whatever the reason."""

    request_id: str
    num_output_tokens: int


class SteeredStep(StepEvent, frozen=True, array_like=True):
    """Whoever knows StepEvents only reads it as one: these fields come last."""

    arrived: list[RequestArrived]
    left: list[RequestLeft]
    is_own_time: bool  # the step's seconds hold nothing of another step's
