"""A scheduler's records of its steps: in flight, and committed with their outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from evenflow.core.deadlines import LateToken
from evenflow.core.plan import StepPlan, StepResult, StepShape
from evenflow.core.request import Request

# A request, its index in the StepResult, its new tokens. A NamedTuple would make a decode cost a fifth more here.
Emission = tuple[Request, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of a step: which requests got tokens, which ended, and which are computed again after a fault."""

    plan: StepPlan
    computed: StepPlan  # the same, with chunks as long as they were computed
    averaged: StepPlan  # with chunks as long as in the average layer: what the seconds were spent on
    result: StepResult
    emissions: list[Emission]
    finished: list[Request]
    shape: StepShape
    predicted_seconds: float
    late: list[LateToken] = field(default_factory=list)
    retried: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was planned and has not been committed."""

    plan: StepPlan
    shape: StepShape
    predicted_seconds: float
    planned_at: float
    sequences: list[Request]  # decodes, then chunks, as in the plan


class Repeat(NamedTuple):
    """A step that gives each stream one token, as a simulation timed it."""

    planned_at: float
    seconds: float  # as in `StepResult`
    committed_at: float
