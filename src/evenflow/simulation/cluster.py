"""A load on replicas behind a router, in virtual time: evenflow's own scheduler on devices of known step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial

from evenflow.core.outcome import Committed, Repeat
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.prefix_cache import hash_blocks
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes
from evenflow.core.step_time import StepTimeModel
from evenflow.errors import InvalidRequest, LateRequest
from evenflow.simulation.devices import ModelDevice, StepWork
from evenflow.simulation.load import Load, LoadRequest, by_session
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.observing import NO_TARGETS, Moment, Observed, Targets
from evenflow.simulation.own_engine import OwnEngine, work_of
from evenflow.simulation.replica import FastForward, Replica
from evenflow.simulation.routing import router_of
from evenflow.simulation.step_times import StepTimes

_NUM_CELLS = 20  # of time, of the arrivals
_NUM_MOMENTS = 300
_MIN_CELL_S = 0.5
_MAX_REPLICAS = 4096
# Sizes of the steps that a server knows when the run starts.
_KNOWN_STREAMS, _KNOWN_CHUNKS = (1, 4, 16, 64, 256), (16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Replicas and their settings."""

    step_times: StepTimes
    policy: PolicySpec
    num_blocks: int
    num_replicas: int = 1
    router: str = "round-robin"
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    classes: Classes = DEFAULT_CLASSES
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    targets: Targets = NO_TARGETS

    @property
    def heeds_step_times(self) -> bool:
        """Do plans depend on predicted seconds?"""
        return self.policy.target is not None or any(one.refuse_late for one in self.classes)

    def scheduler(self, step_time: StepTimeModel) -> Scheduler:
        times = self.step_times
        config = SchedulerConfig(
            num_blocks=self.num_blocks,
            policy=self.policy,
            block_size=times.block_size,
            max_num_seqs=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            enable_prefix_caching=self.enable_prefix_caching,
            classes=self.classes,
            tenant_weights=self.tenant_weights,
        )
        return Scheduler(config, times.caps, step_time=step_time)


class SettledStepTimes(StepTimeModel):
    """Step times that no decision depends on. Learns until it is settled, which saves time."""

    is_settled = False

    def observe(self, shapes: StepShape | Iterable[StepShape], seconds: float, launches: Sequence[float] = ()) -> None:
        if not self.is_settled:
            super().observe(shapes, seconds, launches)

    def learns_between(self, first: StepShape, last: StepShape) -> bool:
        return not self.is_settled and super().learns_between(first, last)


def taught(device: ModelDevice, caps: ExecutorCaps, budget: int) -> SettledStepTimes:
    """What a server that has run before knows of its steps."""
    model, at = SettledStepTimes(), 0.0
    for streams in _KNOWN_STREAMS:
        for length in (0, *(min(length, budget) for length in _KNOWN_CHUNKS)):
            work = StepWork(streams, 1000 * streams, ((2000, length),) if length else ())
            seconds = device.run(work, at).seconds
            model.observe(work.shape(caps), seconds)
            at += seconds
    return model


def cell_seconds(load: Load) -> float:
    """Of the cells of time that figures are kept by."""
    return max(_MIN_CELL_S, load.seconds / _NUM_CELLS)


class Cluster:
    """One run of replicas that a router connects.

    With `fast_forward`, runs of steps in which nothing but tokens happens are not planned one by one.
    """

    def __init__(
        self,
        load: Load,
        setup: Setup,
        seed: int,
        *,
        first_replica: int = 0,  # the number of its first one, of a larger number
        cell_s: float | None = None,
        known: SettledStepTimes | None = None,  # what servers know when they start; None: found out here
        fast_forward: bool = True,
    ) -> None:
        self.observed = Observed(setup.targets, cell_s or cell_seconds(load), setup.num_replicas)
        self.setup = setup
        self._router = router_of(setup.router)
        self._arrivals = [one for one in load.requests if one.arrival_s is not None]
        self._follow_ups = by_session(load.requests)
        self._open_sessions: dict[str, str] = {}  # by request id
        self._num_arrived = 0
        self.moment_s = max(load.seconds, 1.0) / _NUM_MOMENTS
        self._classes = {one.name for one in setup.classes}
        # With several accounts their order depends on each step's charge.
        accounts = {(one.tenant, self._class_of(one)) for one in load.requests}
        is_fast = fast_forward and len(accounts) == 1
        numbers = range(first_replica, first_replica + setup.num_replicas)
        devices = [setup.step_times.device(_MAX_REPLICAS * seed + number) for number in numbers]
        if known is None:
            known = taught(devices[0], setup.step_times.caps, setup.policy.budget)
            known.is_settled = not setup.heeds_step_times
        self.known = known
        self._nodes = [
            _Node(self, number, device, known, is_fast=is_fast) for number, device in zip(numbers, devices, strict=True)
        ]
        self._schedulers = [node.scheduler for node in self._nodes]
        self._loop = Loop(self._next_arrival(), load.until)

    def run(self) -> Observed:
        self._loop.run()
        return self.observed

    def quiet_until(self) -> float:
        """When the next message may come for a replica that is about to plan a step."""
        if len(self._nodes) == 1 or self._follow_ups:
            return min(self._loop.next_at, self._loop.until)
        following = self._arrivals[self._num_arrived : self._num_arrived + 1]
        return min([self._loop.until, *(one.arrival_s or 0.0 for one in following)])

    def _next_arrival(self) -> list[Timed]:
        if self._num_arrived == len(self._arrivals):
            return []
        one = self._arrivals[self._num_arrived]
        return [(one.arrival_s or 0.0, partial(self._arrive, one))]

    def _arrive(self, one: LoadRequest, now: float) -> Iterable[Timed]:
        self._num_arrived += 1
        return [*self._send(one, now), *self._next_arrival()]

    def _send(self, one: LoadRequest, now: float) -> list[Timed]:
        self.observed.arrived(one, now)
        if one.session:
            self._open_sessions[one.id] = one.session
        request = self._request(one, now)
        node = self._nodes[self._router(request, self._schedulers)]
        return list(node.replica.receive(partial(node.take_in, one, request), now))

    def _request(self, one: LoadRequest, now: float) -> Request:
        tokens, block_size = one.token_ids(), self.setup.step_times.block_size
        sampling = SamplingParams(max_tokens=one.num_output_tokens, ignore_eos=True)
        return Request(
            one.id,
            tokens,
            sampling,
            seed=0,
            max_model_len=len(tokens) + one.num_output_tokens,
            block_hashes=hash_blocks(tokens, block_size) if self.setup.enable_prefix_caching else [],
            arrival_time=now,
            tenant=one.tenant,
            service_class=self._class_of(one),
        )

    def _class_of(self, one: LoadRequest) -> str:
        """The default if a trace names one that this server does not have."""
        return one.service_class if one.service_class in self._classes else ""

    def ended(self, request_id: str, now: float) -> list[Timed]:
        """The next request of its session, if it has one."""
        waiting = self._follow_ups.get(self._open_sessions.pop(request_id, ""))
        if not waiting:
            return []
        one = waiting.pop(0)
        return [(now + one.delay_s, partial(self._follow, one))]

    def _follow(self, one: LoadRequest, now: float) -> list[Timed]:
        return self._send(one, now)


class _Node:
    """A replica, with what is counted of it."""

    def __init__(
        self, cluster: Cluster, number: int, device: ModelDevice, known: StepTimeModel, *, is_fast: bool
    ) -> None:
        setup = cluster.setup
        self._cluster, self._number, self._observed = cluster, number, cluster.observed
        self._device = device
        self._largest = setup.step_times.largest
        self._num_steps = 0
        self._next_moment = 0.0
        self.scheduler = setup.scheduler(deepcopy(known))  # each goes on learning by itself
        engine, host = OwnEngine(self.scheduler), setup.step_times.host
        forward = FastForward(engine, cluster.quiet_until, self._repeated) if is_fast else None
        self.replica = Replica(
            engine,
            self._device,
            self._committed,
            schedule_s=host.schedule_s,
            output_s=host.output_s,
            fast_forward=forward,
        )

    def take_in(self, one: LoadRequest, request: Request, now: float) -> None:
        try:
            self.scheduler.add(request)
        except LateRequest:
            self._observed.refuse(one, "its class refuses late requests")
        except InvalidRequest:
            self._observed.refuse(one, "it does not fit in the KV cache")

    def _committed(self, outcome: Committed, now: float) -> list[Timed]:
        self._num_steps += 1
        work = work_of(outcome.plan)
        self._observed.admitted(outcome.plan)
        self._observed.committed(outcome, now, self._num_steps, lambda: self._device.seconds(work))
        self._check(work, len(outcome.emissions))
        self._look(now)
        return [timed for request in outcome.finished for timed in self._cluster.ended(request.id, now)]

    def _repeated(self, requests: list[Request], first: StepWork, repeats: list[Repeat]) -> None:
        def work(number: int) -> StepWork:
            return StepWork(len(requests), first.decode_context + number * len(requests), ())

        step = self._num_steps + 1
        self._num_steps += len(repeats)
        self._observed.repeated(requests, repeats, step, lambda number: self._device.seconds(work(number)))
        self._check(work(len(repeats) - 1), len(requests) * len(repeats))
        self._look(repeats[-1].committed_at)

    def _check(self, work: StepWork, num_tokens: int) -> None:
        if self._largest is not None and (what := self._largest.beyond(work)) is not None:
            self._observed.beyond[what] += num_tokens

    def _look(self, now: float) -> None:
        pool = self.scheduler.pool
        share = pool.num_held / pool.num_blocks
        self._observed.kv_peak = max(self._observed.kv_peak, share)
        if now >= self._next_moment:
            self._next_moment = now + self._cluster.moment_s
            waiting = len(self.scheduler.requests) - self.scheduler.num_running
            self._observed.moments.append(Moment(now, self._number, self.scheduler.num_running, waiting, share))
