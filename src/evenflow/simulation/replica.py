"""One replica: a host that receives messages, plans and commits, and a device that runs the steps.

The host does one thing at a time, as an engine's process does: it launches a step, or waits for the oldest one to end.
It reads messages that arrive meanwhile afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from evenflow.simulation.devices import Device, Ran, StepWork
from evenflow.simulation.loop import Timed

Message = Callable[[float], None]  # called when the host reads it, such as an engine's `add` with a request
Outcome = TypeVar("Outcome")
Outcome_co = TypeVar("Outcome_co", covariant=True)


class Engine(Protocol[Outcome_co]):
    """A scheduler in virtual time. Steps end in the order in which they were scheduled."""

    def schedule(self, now: float) -> StepWork | None:
        """Plan the next step; None if none can be launched now."""

    def launched(self, now: float) -> None:
        """The host has launched the newest step."""

    def commit(self, ran: Ran, now: float) -> Outcome_co:
        """The oldest step in flight has ended."""


class Replica(Generic[Outcome]):
    """An engine on a device. `on_commit` gets each step's outcome and its time, and returns the events that follow."""

    def __init__(
        self,
        engine: Engine[Outcome],
        device: Device,
        on_commit: Callable[[Outcome, float], Iterable[Timed]],
        *,
        schedule_s: float = 0.0,  # host time per step
        output_s: float = 0.0,  # from a step's end on the device until the host commits it
    ) -> None:
        self.now = 0.0  # when the host last launched or committed a step
        self._engine = engine
        self._device = device
        self._on_commit = on_commit
        self._schedule_s = schedule_s
        self._output_s = output_s
        self._inbox: deque[Message] = deque()
        self._in_flight: deque[tuple[Ran, float]] = deque()  # with their ends on the device
        self._free_at = 0.0  # the device
        self._is_idle = True

    def receive(self, message: Message, now: float) -> Iterable[Timed]:
        self._inbox.append(message)
        if not self._is_idle:
            return ()
        self._is_idle = False
        return ((now, self._turn),)

    def _turn(self, now: float) -> Iterable[Timed]:
        while self._inbox:
            self._inbox.popleft()(now)
        if (work := self._engine.schedule(now)) is not None:
            return ((self._launch(work, now + self._schedule_s), self._launched),)
        if self._in_flight:
            return ((max(now, self._in_flight[0][1] + self._output_s), self._commit),)
        self._is_idle = True
        return ()

    def _launch(self, work: StepWork, at: float) -> float:
        """Returns when the host has launched the step. Its first operations run as soon as the device is free."""
        begin, launched = max(self._free_at, at), at + self._device.launch_seconds(work)
        ran = self._device.run(work, begin)
        self._free_at = max(begin + ran.seconds, launched)
        self._in_flight.append((ran._replace(seconds=max(ran.seconds, launched - begin)), self._free_at))
        return launched

    def _launched(self, now: float) -> Iterable[Timed]:
        self.now = now
        self._engine.launched(now)
        return ((now, self._turn),)

    def _commit(self, now: float) -> Iterable[Timed]:
        self.now = now
        outcome = self._engine.commit(self._in_flight.popleft()[0], now)
        return (*self._on_commit(outcome, now), (now, self._turn))
