"""evenflow's own engine in virtual time: its scheduler, with any number of steps in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evenflow.core.outcome import Committed, Repeat
from evenflow.core.plan import StepPlan, StepResult
from evenflow.core.request import Request
from evenflow.core.scheduler import Scheduler
from evenflow.errors import EngineFailed, InvalidConfig
from evenflow.simulation.devices import Ran, StepWork

_TOKEN = (1,)  # every sample


class OwnEngine:
    """Drives a scheduler. Requests must end by their length alone: what is sampled means nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        if scheduler.tier is not None:
            raise InvalidConfig("Got a scheduler with a KV tier but no device of the simulation moves blocks.")
        self.scheduler = scheduler
        self._plans: deque[StepPlan] = deque()  # in flight

    def schedule(self, now: float) -> StepWork | None:
        if not self.scheduler.can_schedule:
            return None
        plan = self.scheduler.schedule(now)
        if plan is None:
            if self.scheduler.requests and not self._plans:
                raise EngineFailed(f"no step can be planned for {len(self.scheduler.requests)} unfinished requests")
            return None
        self._plans.append(plan)
        return work_of(plan)

    def launched(self, now: float) -> None:
        """The scheduler does not ask."""

    def commit(self, ran: Ran, now: float) -> Committed:
        return self.scheduler.commit(result_of(self._plans.popleft(), ran), now)

    def steady(self) -> tuple[StepWork, int] | None:
        """The next step, and the number of equal ones behind it: each gives every stream a token, and does no more."""
        if not (most := self.scheduler.num_repeats()):
            return None
        streams = self.scheduler.seats.decoding.values()
        return StepWork(len(streams), sum([one.num_scheduled for one in streams]) + len(streams), ()), most

    def repeat(self, repeats: Sequence[Repeat]) -> list[Request]:
        """Such steps ran. Returns the streams."""
        streams = list(self.scheduler.seats.decoding.values())
        self.scheduler.repeat(repeats, *_TOKEN)
        self._plans = deque(self.scheduler.plans_in_flight)
        return streams


def work_of(plan: StepPlan) -> StepWork:
    positions = plan.decodes.positions
    return StepWork(
        len(positions),
        sum(positions) + len(positions),
        tuple([(chunk.start, chunk.length) for chunk in plan.chunks]),
        sum([chunk.num_logit_rows for chunk in plan.chunks]),
        plan.most_seconds,
    )


def result_of(plan: StepPlan, ran: Ran) -> StepResult:
    """What an executor would return."""
    chunks = plan.with_lengths({number: one.length for number, one in ran.shed.items()}).chunks
    tokens = (_TOKEN,) * len(plan.decodes) + tuple([_TOKEN if chunk.samples else () for chunk in chunks])
    return StepResult(plan.step_id, tokens, ran.seconds, shed=ran.shed)
