"""One replica: a host that receives messages, plans and commits, and a device that runs the steps.

The host does one thing at a time, as an engine's process does: it launches a step, or waits for the oldest one to end.
It reads messages that arrive meanwhile afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from evenflow.core.outcome import Repeat
from evenflow.core.request import Request
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


class SteadyEngine(Engine[Outcome_co], Protocol):
    """One that can run many steps at once in which each stream gets a token, and nothing else happens."""

    def steady(self) -> tuple[StepWork, int] | None:
        """The next step, and how many such steps there are at least."""

    def repeat(self, repeats: Sequence[Repeat]) -> list[Request]:
        """These ran; returns the streams."""


class FastForward(NamedTuple):
    """How a replica runs such steps at once. Its device must take alike for the same step at the same time."""

    engine: SteadyEngine[object]
    quiet_until: Callable[[], float]  # no message comes before
    on_repeat: Callable[[list[Request], StepWork, list[Repeat]], None]  # the streams, and the first step's work


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
        fast_forward: FastForward | None = None,
    ) -> None:
        self.now = 0.0  # when the host last launched or committed a step
        self._engine = engine
        self._device = device
        self._on_commit = on_commit
        self._schedule_s = schedule_s
        self._output_s = output_s
        self._fast_forward = fast_forward
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
        if self._fast_forward is not None and (later := self._skip(self._fast_forward, now)) > now:
            return ((later, self._turn),)
        if (work := self._engine.schedule(now)) is not None:
            return ((self._launch(work, now + self._schedule_s), self._launched),)
        if self._in_flight:
            return ((max(now, self._in_flight[0][1] + self._output_s), self._commit),)
        self._is_idle = True
        return ()

    def _launch(self, work: StepWork, at: float) -> float:
        """Returns when the host has launched the step. Its first operations run as soon as the device is free."""
        begin, launched = max(self._free_at, at), at + self._device.launch_seconds(work, at)
        ran = self._device.run(work, begin)
        self._free_at = max(begin + ran.seconds, launched)
        self._in_flight.append((Ran(max(ran.seconds, launched - begin), ran.shed), self._free_at))
        return launched

    def _launched(self, now: float) -> Iterable[Timed]:
        self.now = now
        self._engine.launched(now)
        return ((now, self._turn),)

    def _commit(self, now: float) -> Iterable[Timed]:
        self.now = now
        outcome = self._engine.commit(self._in_flight.popleft()[0], now)
        return (*self._on_commit(outcome, now), (now, self._turn))

    def _skip(self, fast: FastForward, now: float) -> float:
        """Run steps in which nothing happens but tokens. Returns when the host has committed the last one."""
        if (steady := fast.engine.steady()) is None:
            return now
        (first, most), until = steady, fast.quiet_until()
        work = first
        repeats: list[Repeat] = []
        while len(repeats) < most:
            free_at = self._free_at
            launched = self._launch(work, now + self._schedule_s)
            ran, end = oldest = self._in_flight.popleft()
            committed_at = max(launched, end + self._output_s)
            if committed_at >= until:
                self._in_flight.appendleft(oldest)
                self._in_flight.pop()
                self._free_at = free_at
                break
            repeats.append(Repeat(now, ran.seconds, committed_at))
            work = StepWork(work.num_decodes, work.decode_context + work.num_decodes, ())
            now = committed_at
        if repeats:
            self.now = now
            fast.on_repeat(fast.engine.repeat(repeats), first, repeats)
        return now
