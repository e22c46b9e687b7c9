"""The interface of executors: plans in, results out."""

from __future__ import annotations

from typing import Protocol

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult


class Executor(Protocol):
    """Runs steps in the order they were submitted.

    `submit` returns at once if the executor runs beside its caller; `wait` returns the oldest submitted step's
    result. Failures of single sequences go into `StepResult.errors` or `faults`. An exception from `wait` fails the
    whole step: it released the plan's slots and did nothing else. Steps already submitted behind it run without the
    rows that depend on it (`lost_slots`); later plans may release slots that were never filled.
    """

    @property
    def caps(self) -> ExecutorCaps: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def close(self) -> None: ...
