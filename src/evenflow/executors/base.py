"""The interface of executors: plans in, results out."""

from __future__ import annotations

from typing import Protocol

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult


class Executor(Protocol):
    """Runs steps in the order they were submitted.

    `submit` returns at once if the executor runs beside its caller; `wait` returns the oldest submitted step's
    result. What is wrong with one sequence goes into `StepResult.errors` or `faults`. An exception from `wait` fails
    the whole step: it has released the plan's slots and done nothing else. Steps submitted behind it run without the
    rows that build on it (`lost_slots`), and later plans may release slots that it did not get to fill.
    """

    @property
    def caps(self) -> ExecutorCaps: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def close(self) -> None: ...
