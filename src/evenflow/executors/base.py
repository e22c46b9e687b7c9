"""The interface of executors: plans in, results out."""

from __future__ import annotations

from typing import Protocol

from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult


class Executor(Protocol):
    """Runs steps in the order they were submitted.

    `submit` returns at once if the executor runs beside its caller; `wait` returns the oldest submitted step's
    result. An error of one sequence goes into `StepResult.errors`; an exception from `wait` fails the whole step and
    leaves the executor able to run the next.
    """

    @property
    def caps(self) -> ExecutorCaps: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def close(self) -> None: ...
