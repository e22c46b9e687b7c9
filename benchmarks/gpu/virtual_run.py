"""A load in virtual time on one replica: its clients, and what they saw.

`host_run` has vLLM's scheduler with the steering that runs inside vLLM, or with a fixed budget in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from outcomes import Outcome, Stream, outcome_of
from random_loads import Client, Load
from recorded_device import RecordedDevice

from evenflow.core.policies import PolicySpec
from evenflow.hosts.settings import Settings
from evenflow.hosts.steering import Host, HostRequest
from evenflow.simulation.devices import Device
from evenflow.simulation.host_engine import HostEngine, HostOutcome, SteeredHostEngine
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.replica import Engine, Replica

_BUDGET = 8192
_MAX_RUNNING = 256
# Host seconds around a launch, medians of the recordings.
_SCHEDULE_S = 0.0004
_OUTPUT_S = 0.0006  # from the end on the device to the host's hands

StepOutcome = TypeVar("StepOutcome")


class Clients:
    """The clients of a load: each sends its next request `pause_s` after its last answer."""

    def __init__(self, load: Load, receive: Callable[[Stream, float], Iterable[Timed]]) -> None:
        self.streams: dict[str, Stream] = {}  # that were sent
        self.num_unanswered = 0  # of the long prompts, also those to come
        self._load = load
        self._receive = receive
        self._numbers = count()

    def start(self) -> list[Timed]:
        return [self._send(client, 0, client.start_s) for client in (*self._load.chats, *self._load.long_prompts)]

    def _send(self, client: Client, turn: int, at: float) -> Timed:
        size, is_long = client.turns[turn % len(client.turns)], not client.repeats
        self.num_unanswered += is_long
        sizes = size.prompt_tokens, size.output_tokens, size.cached_tokens
        return at, partial(self._arrive, Stream(f"r{next(self._numbers)}", client, turn, at, is_long, *sizes))

    def _arrive(self, stream: Stream, now: float) -> Iterable[Timed]:
        self.streams[stream.id] = stream
        return self._receive(stream, now)

    def take(self, request_ids: Iterable[str], now: float) -> list[Timed]:
        """A token for each of these requests. Returns the requests that follow."""
        sent = []
        for stream in map(self.streams.__getitem__, request_ids):
            stream.token_times.append(now)
            if len(stream.token_times) == stream.max_tokens:
                self.num_unanswered -= stream.is_long
                client, turn = stream.client, stream.turn + 1
                if client.repeats or turn < len(client.turns):
                    sent.append(self._send(client, turn, now + client.pause_s))
        return sent


class Tokens(NamedTuple):
    """What a step gave."""

    request_ids: Sequence[str]
    error: float | None  # of its prediction, relative; None: it cannot be judged


class VirtualRun(Generic[StepOutcome]):
    """One load on a replica. `add` gives a request to the engine."""

    def __init__(
        self,
        load: Load,
        engine: Engine[StepOutcome],
        device: Device,
        add: Callable[[Stream, float], None],
        tokens_of: Callable[[StepOutcome], Tokens],
        *,
        schedule_s: float = 0.0,
        output_s: float = 0.0,
    ) -> None:
        self.streams: list[Stream] = []  # that the engine has taken in
        self._add = add
        self._tokens_of = tokens_of
        self._replica = Replica(engine, device, self._commit, schedule_s=schedule_s, output_s=output_s)
        self._clients = Clients(load, lambda stream, now: self._replica.receive(partial(self._take_in, stream), now))
        self._errors: list[float] = []
        self._seconds = load.seconds
        self._loop = Loop(self._clients.start(), load.seconds)
        self._until_answered = False

    def run(self, *, until_answered: bool = False) -> Outcome:
        """For the load's seconds, or only until every long prompt has its answer."""
        self._until_answered = until_answered
        self._loop.run()
        seconds = self._replica.now if until_answered else max(self._replica.now, self._seconds)
        return outcome_of(self.streams, self._errors, seconds)

    def _take_in(self, stream: Stream, now: float) -> None:
        self.streams.append(stream)
        self._add(stream, now)

    def _commit(self, outcome: StepOutcome, now: float) -> list[Timed]:
        request_ids, error = self._tokens_of(outcome)
        if error is not None:
            self._errors.append(error)
        sent = self._clients.take(request_ids, now)
        if self._until_answered and not self._clients.num_unanswered:
            self._loop.until = now
        return sent


def host_run(device: RecordedDevice, load: Load, policy: str) -> VirtualRun[HostOutcome]:
    """`policy`: `target:50ms`, or `fixed:1024` for a budget without steering."""
    spec = PolicySpec.parse(policy)
    if spec.target is None:
        engine = HostEngine(spec.max_step_tokens or _BUDGET, _MAX_RUNNING)
    else:
        host = Host(device.caps, _BUDGET, _MAX_RUNNING, None, logging.getLogger("replay"), device.prior)
        engine = SteeredHostEngine(host, Settings(spec, None, None))

    def add(stream: Stream, now: float) -> None:
        prompt = stream.num_prompt_tokens
        engine.add(HostRequest(stream.id, stream.due, prompt, prompt, stream.num_cached_tokens, stream.max_tokens), now)

    return VirtualRun(load, engine, device, add, _tokens_of_host, schedule_s=_SCHEDULE_S, output_s=_OUTPUT_S)


def _tokens_of_host(outcome: HostOutcome) -> Tokens:
    step = outcome.step
    is_judged = step.predicted and step.is_own_time and step.chunks and step.decode_ids
    return Tokens(outcome.ids, step.predicted / step.seconds - 1 if is_judged else None)
