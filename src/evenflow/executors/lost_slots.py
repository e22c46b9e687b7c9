"""Sequences of failed steps, which have lost their state.

Later steps may have been submitted already. Their rows of lost sequences are left out: the scheduler recomputes these
requests, and reads no such row.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from evenflow.core.plan import Decodes, StepPlan, StepResult

_LOST = "A step before this one failed."
_BY_ROW = ("errors", "logprobs", "prompt_logprobs", "embeddings", "faults", "shed")


@dataclass(frozen=True, slots=True)
class Remaining:
    """A plan without the rows of lost slots."""

    plan: StepPlan
    rows: tuple[int, ...] | None = None  # indices of its rows in the whole plan; None: all of them
    num_sequences: int = 0  # of the whole plan

    def result(self, found: StepResult) -> StepResult:
        """The result of the whole plan: rows left out have a fault."""
        rows = self.rows
        if rows is None:
            return found
        tokens: list[tuple[int, ...]] = [()] * self.num_sequences
        for row, given in zip(rows, found.tokens, strict=True):
            tokens[row] = given
        by_row: dict[str, Any] = {
            name: {rows[row]: one for row, one in getattr(found, name).items()} for name in _BY_ROW
        }
        by_row["faults"] |= dict.fromkeys(set(range(self.num_sequences)) - set(rows), _LOST)
        return replace(found, tokens=tuple(tokens), **by_row)


class LostSlots:
    """The slots of failed steps, until they are released."""

    def __init__(self) -> None:
        self._slots: set[int] = set()

    def add(self, plan: StepPlan) -> Set[int]:
        """Add the slots of a failed step: none holds a sequence any more."""
        failed = {
            *plan.decodes.slots,
            *(chunk.slot for chunk in plan.chunks),
            *(admission.slot for admission in plan.admissions),
            *(change.slot for change in plan.block_changes),
        }
        self._slots |= failed
        return failed

    def remaining(self, plan: StepPlan) -> Remaining:
        """The part of the next plan that an executor can run."""
        lost = self._slots
        lost -= {*plan.released_slots, *(one.slot for one in plan.admissions)}
        if not lost:
            return Remaining(plan)
        slots = (*plan.decodes.slots, *(chunk.slot for chunk in plan.chunks))
        rows = tuple(row for row, slot in enumerate(slots) if slot not in lost)
        one = plan.decodes
        columns = zip(one.request_ids, one.epochs, one.slots, one.positions, strict=True)
        kept = [column for column in columns if column[2] not in lost]
        return Remaining(
            replace(
                plan,
                decodes=Decodes(*zip(*kept, strict=True)) if kept else Decodes(),
                chunks=tuple(chunk for chunk in plan.chunks if chunk.slot not in lost),
                block_changes=tuple(change for change in plan.block_changes if change.slot not in lost),
            ),
            rows,
            len(slots),
        )
