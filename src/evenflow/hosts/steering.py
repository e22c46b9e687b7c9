"""Keeps a latency target inside a host engine: sizes each step's prefill, learns what steps take, reports them.

The host engine's adapter describes requests and steps to it in plain figures, and enforces the quotas it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from evenflow.best_effort import BestEffort
from evenflow.core.account import NOBODY, Account
from evenflow.core.deadlines import LateToken, Place, StreamDeadline
from evenflow.core.feasibility import round_up
from evenflow.core.plan import ChunkReason, ExecutorCaps
from evenflow.core.planner import Planner
from evenflow.core.policies import WHOLE_PROMPTS, PolicySpec
from evenflow.core.policy import Candidate, Quota
from evenflow.core.prices import Prices
from evenflow.core.report import AdmissionReport, Attribution, ChunkReport, StepReport
from evenflow.core.service_lines import ServiceLines
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
from evenflow.duration import format_range
from evenflow.hosts.in_flight import InFlightStep, InFlightSteps, Observation
from evenflow.hosts.policy_file import NO_TARGET, PolicyFile
from evenflow.hosts.reporter import Reporter
from evenflow.hosts.settings import Settings
from evenflow.step_time_store import load_step_times, save_step_times

_STEPS_BETWEEN_SAVES = 8192  # of step times: a save takes a millisecond


@dataclass(frozen=True, slots=True)
class Host:
    """What steering needs to know of a host engine, once."""

    caps: ExecutorCaps
    budget: int  # its own, which remains the limit
    max_num_seqs: int
    step_times_path: Path | None  # None: they are not kept
    logger: logging.Logger
    prior: StepCosts | None = None  # what steps cost before any was measured
    num_stages: int = 1  # of a pipeline: a stream's next token takes this many steps
    own_policy: PolicySpec | None = None  # what it does without a target; None: something that has no name here


class HostRequest(NamedTuple):
    """A request as it arrives."""

    id: str
    arrival_time: float  # of the wall clock
    num_prompt_tokens: int
    num_tokens: int
    num_cached_tokens: int
    max_tokens: int
    tbt_target: float | None = None
    ttft_target: float | None = None
    tenant: str = ""
    service_class: str = ""  # "": the default


class Decode(NamedTuple):
    """A stream's rows in the next step: one, or more with speculated tokens."""

    request_id: str
    rows: int
    context: int  # positions that its last row sees


def _rows_and_context(decodes: Sequence[Decode]) -> tuple[int, int]:
    """How many rows decode, and the positions that they attend to."""
    return sum([rows for _, rows, _ in decodes]), sum([rows * context for _, rows, context in decodes])


class HostLoad(NamedTuple):
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1


@dataclass(slots=True, eq=False)
class _Stream:
    """A request, as the planner looks at it. Whether it waits or runs is for the host to know."""

    id: str
    arrival_time: float
    num_known: int  # tokens, as far as is known when it arrives
    tenant: str
    service_class: str
    deadline: StreamDeadline
    place: Place = field(init=False)  # set by the planner, as are the next two
    rank: tuple[float, int] = (0.0, 0)
    account: Account = NOBODY
    num_scheduled: int = 0  # of the prompt's tokens, as far as is known
    is_admitted: bool = False  # it has been part of a step
    num_output_tokens: int = 0
    is_running: bool = True  # the host's queue is not kept here

    @property
    def is_prompt(self) -> bool:
        return self.num_scheduled < self.num_known


class Steering:
    """One host scheduler's policy, step by step. It keeps what the host does not: deadlines, ranks and step times."""

    clock = staticmethod(time.perf_counter)
    wall_clock = staticmethod(time.time)  # of arrival times

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self._policy_file = PolicyFile(settings.target_file) if settings.target_file else None
        self.best_effort = BestEffort(host.logger)
        stored = self.best_effort.run("reading step times", self._stored_step_times, None)
        step_time = stored or StepTimeModel(host.prior)
        self._attribution = Attribution(step_time)
        self._reporter = Reporter(host.logger, settings.step_socket)
        prices = Prices(step_time, host.caps)
        order = ServiceLines[_Stream](settings.classes, settings.tenant_weights, prices.prefill)
        self.planner = Planner(
            order, prices, self._planned(settings.policy), max_num_seqs=host.max_num_seqs, num_stages=host.num_stages
        )
        self._in_flight = InFlightSteps()
        self._observations: list[Observation] = []  # of which the model does not know yet
        self._num_steps = 0
        self._save_at = _STEPS_BETWEEN_SAVES
        self.policy = settings.policy

    def _stored_step_times(self) -> StepTimeModel | None:
        path = self._host.step_times_path
        return None if path is None else load_step_times(path, self._host.prior)

    def set_policy(self, spec: PolicySpec | None) -> None:
        """None: the host uses its own budget."""
        self.policy = spec
        self.planner.set_policy(self._planned(spec))

    def _planned(self, spec: PolicySpec | None) -> PolicySpec:
        return (spec or self._host.own_policy or WHOLE_PROMPTS).bounded(self._host.budget)

    @property
    def target(self) -> float | None:
        return None if self.policy is None else self.policy.target

    @property
    def step_time(self) -> StepTimeModel:
        return self.planner.step_time

    @property
    def is_active(self) -> bool:
        return self.target is not None

    def log_start(self, host: str, why_no_target: str | None) -> None:
        """Log what this does in the host, with the host's name and version."""
        logger = self._host.logger
        if self.target is None:
            logger.info("evenflow: no latency target on %s; steps are only reported", host)
        elif why_no_target is None:
            logger.info("evenflow: latency target %g ms on %s", 1000 * self.target, host)
        else:
            logger.warning("evenflow: no latency target is kept: %s", why_no_target)

    # ---- before a step ----

    def begin_step(self) -> None:
        """The host is about to schedule a step, and has sent the last one's tokens: now learning delays no token."""
        self.best_effort.run("learning step times", self._learn, None)
        self.best_effort.run("changing the target", self._follow_policy_file, None)

    def _follow_policy_file(self) -> None:
        policy = self._policy_file.read_if_changed(self.policy) if self._policy_file is not None else self.policy
        if policy is not self.policy:
            self.set_policy(policy)
            change = "no latency target" if self.target is None else f"latency target {1000 * self.target:g} ms"
            self._host.logger.info("evenflow: %s from now on", change)

    def _learn(self) -> None:
        observations, self._observations = self._observations, []
        for observation in observations:
            self.planner.observe(*observation)
        if self._num_steps >= self._save_at:
            self._save_at = self._num_steps + _STEPS_BETWEEN_SAVES
            self.keep_step_times()

    def add(self, request: HostRequest) -> None:
        """Its place in line depends on what is known of step times now."""
        self.best_effort.run("learning step times", self._learn, None)
        now = self.clock()
        arrived_at = now - max(0.0, self.wall_clock() - request.arrival_time)
        stream = _Stream(
            request.id, arrived_at, request.num_tokens, request.tenant, request.service_class, StreamDeadline()
        )
        stream.num_scheduled = request.num_cached_tokens
        if (before := self._streams.get(request.id)) is not None:  # the host took it up again
            self.planner.left(before)
        self.planner.place(stream, request.num_cached_tokens, request.tbt_target, request.ttft_target)
        self.planner.arrived(stream)
        sizes = request.num_prompt_tokens, request.max_tokens
        self.best_effort.run("reports", partial(self._reporter.arrived, request.id, arrived_at, *sizes), None)

    def line_up(self, now: float, request_ids: Sequence[str], room: int) -> dict[str, int]:
        """The place in line of each of these prompts: in order of service as far as `room` goes, then as given."""
        self.planner.line_up(now)
        starts = [(stream, stream.num_scheduled) for stream in map(self._streams.__getitem__, request_ids)]
        ordered = dict.fromkeys(stream.id for stream, _ in self.planner.order.arrange(starts, room))
        return {request_id: place for place, request_id in enumerate(ordered | dict.fromkeys(request_ids))}

    def level(self, request_id: str) -> int:
        """How urgent it is: the lower, the more."""
        return self._streams[request_id].account.level

    @property
    def _streams(self) -> dict[str, _Stream]:
        return self.planner.requests

    @property
    def num_streams(self) -> int:
        """Requests that have not left."""
        return len(self._streams)

    def plan(
        self,
        now: float,
        decodes: Sequence[Decode],
        candidates: Sequence[Candidate],
        free_tokens: int,
        long_prefill_token_threshold: int,
    ) -> tuple[int, Sequence[Quota]]:
        """Rows that decode in the next step, and the prefill that keeps their next tokens on time."""
        streams = self._streams
        for candidate in candidates:
            streams[candidate.request_id].num_scheduled = candidate.start
        num_rows, context = _rows_and_context(decodes)
        quotas = self.planner.plan(
            now,
            (streams[request_id] for request_id, rows, _ in decodes if rows),
            candidates,
            num_decodes=num_rows,
            decode_context=context,
            num_in_flight=self._in_flight.num_steps,
            overhead=0.0,  # a step's seconds are counted from before it is planned
            free_tokens=free_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        if (feasible := self.planner.policy.infeasibility_warning()) is not None:
            self._host.logger.warning(
                "evenflow: a target of %g ms is infeasible beside prefill. The lowest feasible one is estimated at %s.",
                1000 * (self.target or 0.0),
                format_range(*map(self._of_all_stages, feasible)),
            )
        return num_rows, quotas.chunks

    def _of_all_stages(self, seconds: float) -> float:
        """A target for streams, from one for the steps that give them each token."""
        return round_up(self._host.num_stages * seconds)

    # ---- after a step ----

    def scheduled(self, step: InFlightStep, decodes: Sequence[Decode], num_ended: int) -> None:
        """The host scheduled this step; `step.chunks` are set. `num_ended`: chunks that end their prompt."""
        step.admissions = list(self._admit(step.chunks))
        if decodes or step.chunks:
            num_rows, context = _rows_and_context(decodes)
            step.shape = self._host.caps.step_shape(
                num_decodes=num_rows,
                decode_context=context,
                chunks=[(start, length) for _, start, length in step.chunks],
                prefill_logit_rows=num_ended,
            )
            step.predicted = self.step_time.predict(step.shape)
            self._charge(step, decodes, step.shape.total_rows)
        step.launched_at = self.clock()  # unless the host says when it has
        self._in_flight.add(step)

    def _charge(self, step: InFlightStep, decodes: Sequence[Decode], num_rows: int) -> None:
        """What the step gives to each prompt and each account."""
        streams = self._streams
        chunks = [(streams[one], start, length) for one, start, length in step.chunks if one in streams]
        for stream, start, length in chunks:
            stream.num_scheduled = start + length
        rows = ((streams[one.request_id].account, one.context) for one in decodes if one.request_id in streams)
        self.planner.charge(rows, chunks, num_rows, step.predicted)

    def _admit(self, chunks: Iterable[tuple[str, int, int]]) -> Iterator[AdmissionReport]:
        """The requests whose first chunk is among these. The host's own metrics count those that come back."""
        for request_id, start, _ in chunks:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.is_admitted:
                stream.is_admitted = True
                yield AdmissionReport(request_id, stream.place.num_tokens, start, was_preempted=False)

    def launched(self, key: object) -> None:
        """The host has launched the step with this key."""
        step = self._in_flight.launched(key, self.clock())
        if step is not None and step.shape is not None:
            self.step_time.observe_launch(step.shape, step.launch_seconds)

    def ended(self, key: object, device_seconds: float | None = None) -> InFlightStep:
        """The host has the output of the step with this key; `device_seconds` as in `InFlightSteps.end`."""
        return self._in_flight.end(key, self.clock(), device_seconds)

    def emitted(
        self,
        step: InFlightStep,
        tokens: Mapping[str, Sequence[int]],
        open_requests: Mapping[str, object],  # that the host still has
        load: HostLoad,
    ) -> None:
        """The host has handed out the step's tokens."""
        if step.shape is None:
            return
        if (observation := self._in_flight.observation) is not None:
            self._observations.append(observation)
        streams = self._streams
        served = list(map(streams.__getitem__, tokens))
        for stream, given in zip(served, tokens.values(), strict=True):
            stream.num_output_tokens += len(given)
        late = self.planner.emitted(served, step.ended_at)
        if len(streams) > len(open_requests):
            for request_id in streams.keys() - open_requests.keys():
                stream = streams[request_id]
                self.planner.left(stream)
                left = partial(self._reporter.left, request_id, stream.num_output_tokens)
                self.best_effort.run("reports", left, None)
        self._num_steps += 1
        self.best_effort.run("reports", lambda: self._reporter.report(self._report(step, tokens, late, load)), None)

    def _report(
        self, step: InFlightStep, tokens: Mapping[str, Sequence[int]], late: list[LateToken], load: HostLoad
    ) -> StepReport:
        assert step.shape is not None
        shapes = [
            self._host.caps.step_shape(
                num_decodes=step.shape.decode_sequences,
                decode_context=step.shape.decode_context,
                chunks=[(start, length) for _, start, length in step.chunks[:num_chunks]],
            )
            for num_chunks in range(len(step.chunks) + 1)
        ]
        decoded = [request_id for request_id in tokens if request_id in step.decode_ids]
        ids = decoded + [request_id for request_id in tokens if request_id not in step.decode_ids]
        feasible = self.planner.policy.feasible_target
        report = StepReport(
            step_id=self._num_steps,
            at=step.ended_at,
            seconds=step.seconds,
            predicted_seconds=step.predicted,
            decode_seconds=0.0,
            num_decodes=step.shape.decode_sequences,
            chunks=[
                ChunkReport(*chunk, step.reasons.get(chunk[0], ChunkReason.BUDGET), 0.0, chunk[0] in tokens)
                for chunk in step.chunks
            ],
            admissions=step.admissions,
            causes=(),
            late=late,
            policy=str(self.policy or self._host.own_policy or NO_TARGET),
            budget=self._host.budget,
            target_s=self.target,
            feasible_target_s=None if feasible is None else self._of_all_stages(feasible),
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            kv_cache_usage=load.kv_cache_usage,
            ids=ids,
            tokens=[tuple(tokens[request_id]) for request_id in ids],
            num_decoded=len(decoded),
            ended={},
            is_own_time=step.is_own_time,
        )
        return self._attribution.split(report, shapes)

    def save(self) -> None:
        """Keep the step times for the next start."""
        self.best_effort.run("learning step times", self._learn, None)
        if self.step_time.is_calibrated:
            self.keep_step_times()

    def keep_step_times(self) -> None:
        if (path := self._host.step_times_path) is not None:
            self.best_effort.run("keeping step times", partial(save_step_times, self.step_time, path), None)

    def close(self) -> None:
        self.save()
        self.best_effort.run("reports", self._reporter.close, None)
