"""Wraps any executor and fails on purpose, to test the engine's promises for each fault at each moment.

FaultyExecutor(executor, [Fault("raise", "decode", after=3), Fault("nan", "prefill", request_id="a")])
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from evenflow.core.plan import NO_TIER_RESULT, Decodes, ExecutorCaps, StepPlan, StepResult, TierResult
from evenflow.errors import InvalidConfig, OutOfMemory
from evenflow.executors.base import Executor
from evenflow.executors.lost_slots import LostSlots, Remaining

FaultKind = Literal["raise", "nan", "hang", "out-of-memory"]
Moment = Literal["admission", "prefill", "decode", "restore", "commit"]
FAULT_KINDS: tuple[FaultKind, ...] = ("raise", "nan", "hang", "out-of-memory")
MOMENTS: tuple[Moment, ...] = ("admission", "prefill", "decode", "restore", "commit")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and when.

    admission          in a step that admits requests, after `num_admitted` of them: before its decodes, too
    prefill, decode    before the rows of a step with such rows are computed
    restore            the same, in a step that restores KV: a cached prefix or a recomputed request. Blocks that it was
                       to fetch from host memory or disk are lost
    commit             after the step ran: its KV is written and its tokens are sampled, but the result is lost
    """

    kind: FaultKind
    moment: Moment
    after: int = 0  # such moments before the first fault
    count: int = 1  # consecutive such moments that fail
    request_id: str | None = None  # limits the fault to one request; None: any
    num_admitted: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("kind", FAULT_KINDS), ("moment", MOMENTS)):
            if getattr(self, name) not in allowed:
                raise InvalidConfig(f"Got {name}={getattr(self, name)!r} but expected one of: {', '.join(allowed)}.")
        for name, least in (("after", 0), ("count", 1), ("num_admitted", 0)):
            if getattr(self, name) < least:
                raise InvalidConfig(f"Got {name}={getattr(self, name)} but expected >= {least}.")

    def rows(self, plan: StepPlan) -> list[int]:
        """Indices of the plan's affected sequences."""
        num_decodes = len(plan.decodes)
        names = [*plan.decodes.request_ids, *(chunk.request_id for chunk in plan.chunks)]
        admitted = {one.request_id for one in plan.admissions}
        restored = {one.request_id for one in plan.admissions if one.num_cached_tokens or one.epoch}
        rows = {
            "admission": [row for row, name in enumerate(names) if name in admitted],
            "prefill": range(num_decodes, len(names)),
            "decode": range(num_decodes),
            "restore": [row for row, name in enumerate(names) if name in restored],
            "commit": range(len(names)),
        }[self.moment]
        return [row for row in rows if self.request_id in (None, names[row])]

    def concerns(self, plan: StepPlan) -> bool:
        """Also true of a step that only fetches KV for waiting requests; such a step has no logits."""
        fetches = bool(plan.moves.restores) and self.moment == "restore" and self.kind != "nan"
        return (fetches and self.request_id is None) or bool(self.rows(plan))

    def interrupted(self, plan: StepPlan) -> StepPlan:
        """The part of the plan that runs before the failure. Releases and block moves do, unless the moves fail."""
        if self.moment == "commit":
            return plan
        moves = plan.moves._replace(restores=()) if self.moment == "restore" else plan.moves
        admissions, changes = plan.admissions, plan.block_changes
        if self.moment == "admission":
            admissions = admissions[: self.num_admitted]
            filled = {one.slot for one in admissions}
            changes = tuple(change for change in changes if change.slot in filled)
        return replace(plan, admissions=admissions, block_changes=changes, decodes=Decodes(), chunks=(), moves=moves)


class FaultyExecutor:
    """Implements `Executor`. A hung step hangs until `close`."""

    def __init__(self, executor: Executor, faults: Iterable[Fault]) -> None:
        self._executor = executor
        self._faults = list(faults)
        self._num_seen = [0] * len(self._faults)
        self._in_flight: deque[tuple[Remaining, Fault | None]] = deque()
        self._lost = LostSlots()
        self._unreported = NO_TIER_RESULT  # tier results of failed steps
        self._is_closed = threading.Event()
        self.num_raised = 0  # injected faults

    @property
    def caps(self) -> ExecutorCaps:
        return self._executor.caps

    def submit(self, plan: StepPlan) -> None:
        remaining = self._lost.remaining(plan)
        computed = remaining.plan
        fault = self._due(computed)
        if fault is not None and fault.kind != "nan":
            computed = fault.interrupted(computed)
            self._lost.add(plan)
        self._executor.submit(computed)
        self._in_flight.append((remaining, fault))

    def wait(self) -> StepResult:
        remaining, fault = self._in_flight.popleft()
        plan = remaining.plan
        result = self._executor.wait()
        moved, self._unreported = self._unreported.then(result.tier), NO_TIER_RESULT
        result = replace(result, tier=moved)
        if fault is None:
            return remaining.result(result)
        self.num_raised += 1
        if fault.kind != "nan":
            lost = [block_hash for _, block_hash in plan.moves.restores] if fault.moment == "restore" else []
            self._unreported = moved.then(TierResult(lost=tuple(lost)))
        where = f"injected in step {plan.step_id} at {fault.moment}"
        match fault.kind:
            case "raise":
                raise RuntimeError(f"a fault was {where}")
            case "out-of-memory":
                raise OutOfMemory(f"memory ran out: {where}")
            case "hang":
                self._is_closed.wait()
                raise RuntimeError(f"a hang was {where}")
            case "nan":
                rows = fault.rows(plan)
                tokens = tuple(() if row in rows else given for row, given in enumerate(result.tokens))
                faults = {**result.faults, **dict.fromkeys(rows, f"the logits are NaN: {where}")}
                return remaining.result(replace(result, tokens=tokens, faults=faults))

    def close(self) -> None:
        self._is_closed.set()
        self._executor.close()

    def _due(self, plan: StepPlan) -> Fault | None:
        """The first fault due now. Every matching fault counts the moment."""
        due: Fault | None = None
        for number, fault in enumerate(self._faults):
            if fault.concerns(plan):
                self._num_seen[number] += 1
                if fault.after < self._num_seen[number] <= fault.after + fault.count:
                    due = due or fault
        return due
