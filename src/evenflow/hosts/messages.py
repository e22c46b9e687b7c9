"""What evenflow inside a host engine sends to evenflow's front for each step."""

from __future__ import annotations

import msgspec

from evenflow.core.report import StepReport


class RequestArrived(msgspec.Struct, frozen=True, array_like=True):
    request_id: str
    at: float  # of `time.perf_counter`, like a report's times
    num_prompt_tokens: int
    max_tokens: int


class RequestLeft(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended, for whatever reason."""

    request_id: str
    num_output_tokens: int


class HostStep(msgspec.Struct, frozen=True, array_like=True):
    report: StepReport
    arrived: list[RequestArrived]  # since the last message
    left: list[RequestLeft]
