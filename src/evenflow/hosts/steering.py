"""Keeps a latency target inside a host engine: sizes each step's prefill, learns what steps take, reports them.

The host engine's adapter describes requests and steps to it in plain figures, and enforces the quotas it returns.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from evenflow.core.account import NOBODY, Account
from evenflow.core.deadlines import LateToken, Place, StreamDeadline, rank_time, rank_times, urgency
from evenflow.core.feasibility import round_up
from evenflow.core.plan import ChunkReason, ExecutorCaps
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate, Policy, Quota, StepView
from evenflow.core.prices import prefill_price, step_prices
from evenflow.core.report import AdmissionReport, Attribution, ChunkReport, StepReport
from evenflow.core.service_classes import find_class
from evenflow.core.service_lines import ServiceLines
from evenflow.core.step_costs import StepCosts
from evenflow.core.step_time import StepTimeModel
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
    step_times_path: Path
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


class HostLoad(NamedTuple):
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0 to 1


@dataclass(slots=True, eq=False)
class _Stream:
    """A request, as `ServiceLines` looks at it. Whether it waits or runs is for the host to know."""

    id: str
    deadline: StreamDeadline
    place: Place
    tenant: str
    service_class: str
    rank: tuple[float, int]  # within its account, prompts are served in this order
    account: Account = NOBODY
    num_scheduled: int = 0  # of the prompt's tokens, as far as is known
    is_admitted: bool = False  # it has been part of a step
    num_output_tokens: int = 0
    is_running: bool = True  # the host's queue is not kept here

    @property
    def arrival_time(self) -> float:
        return self.place.arrival_time

    @property
    def num_known(self) -> int:
        return self.place.num_tokens

    @property
    def is_prompt(self) -> bool:
        return not self.num_output_tokens

    def got_to(self, position: int) -> None:
        """Set how far its prompt is computed; until its first token, at least one position is left."""
        self.num_scheduled = min(position, self.num_known - 1)


class Steering:
    """One host scheduler's policy, step by step. It keeps what the host does not: deadlines, ranks and step times."""

    clock = staticmethod(time.perf_counter)
    wall_clock = staticmethod(time.time)  # of arrival times

    def __init__(self, host: Host, settings: Settings) -> None:
        self._host = host
        self._policy_file = PolicyFile(settings.target_file) if settings.target_file else None
        self.step_time = load_step_times(host.step_times_path, host.prior) or StepTimeModel(host.prior)
        self._attribution = Attribution(self.step_time)
        self._reporter = Reporter(host.logger, settings.step_socket)
        self._streams: dict[str, _Stream] = {}
        self._order = ServiceLines[_Stream](settings.classes, settings.tenant_weights, self._prefill_price)
        self._num_arrivals = 0
        self._in_flight = InFlightSteps()
        self._observations: list[Observation] = []  # of which the model does not know yet
        self._num_steps = 0
        self._save_at = _STEPS_BETWEEN_SAVES
        self.set_policy(settings.policy)

    def set_policy(self, spec: PolicySpec | None) -> None:
        """None: the host uses its own budget."""
        self.policy = spec
        self._pacing = spec.pacing if spec is not None else None
        self._planner: Policy | None = None
        if spec is not None and spec.target is not None:
            staged = replace(spec, seconds=spec.target / self._host.num_stages, written="")
            self._planner = staged.bounded(self._host.budget).build()
        for stream in self._streams.values():
            stream.deadline.restart(self._pacing)

    @property
    def target(self) -> float | None:
        return None if self._pacing is None else self._pacing.target

    @property
    def is_active(self) -> bool:
        return self._planner is not None

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
        self._learn()
        policy = self._policy_file.read_if_changed(self.policy) if self._policy_file is not None else self.policy
        if policy is not self.policy:
            self.set_policy(policy)
            change = "no latency target" if self.target is None else f"latency target {1000 * self.target:g} ms"
            self._host.logger.info("evenflow: %s from now on", change)

    def _learn(self) -> None:
        for observation in self._observations:
            self.step_time.observe(*observation)
        self._observations.clear()
        if self._num_steps >= self._save_at:
            self._save_at = self._num_steps + _STEPS_BETWEEN_SAVES
            self.keep_step_times()

    def add(self, request: HostRequest) -> None:
        now = self.clock()
        arrived_at = now - max(0.0, self.wall_clock() - request.arrival_time)
        of_class = find_class(self._order.classes, request.service_class or None)
        ttft_target = request.ttft_target or of_class.ttft_target
        place = Place(arrived_at, request.num_tokens, request.num_cached_tokens, ttft_target)
        deadline = StreamDeadline(request.tbt_target or of_class.tbt_target)
        stream = _Stream(request.id, deadline, place, request.tenant, of_class.name, (arrived_at, self._num_arrivals))
        stream.got_to(place.num_cached_tokens)
        self._num_arrivals += 1
        if request.id in self._streams:  # the host took it up again
            self._order.discard(self._streams[request.id])
        self._streams[request.id] = stream
        self._order.add(stream)
        stream.rank = rank_time(place, place.num_cached_tokens, self._patience, self._prefill_seconds), stream.rank[1]
        self._reporter.arrived(request.id, arrived_at, request.num_prompt_tokens, request.max_tokens)

    def rank(self, request_id: str) -> tuple[int, float, int, tuple[float, int]]:
        """Prompts are served in this order: by class, tenant, and arrival with patience."""
        return self._order.key(self._streams[request_id])

    def level(self, request_id: str) -> int:
        """How urgent it is: the lower, the more."""
        return self._streams[request_id].account.level

    @property
    def _patience(self) -> float:
        return self._planner.patience if self._planner is not None else 0.0

    def _prefill_seconds(self, start: int, length: int) -> float:
        return self.step_time.predict(self._host.caps.prefill_shape(start, length))

    def _prefill_price(self, start: int, length: int) -> float:
        return prefill_price(self.step_time, self._host.caps, start, length)

    @property
    def num_streams(self) -> int:
        """Requests that have not left."""
        return len(self._streams)

    def plan(
        self,
        now: float,
        decodes: Iterable[Decode],
        candidates: Sequence[Candidate],
        free_tokens: int,
        long_prefill_token_threshold: int,
    ) -> tuple[int, Sequence[Quota]]:
        """Rows that decode in the next step, and the prefill that keeps their next tokens on time."""
        assert self._planner is not None
        assert self._pacing is not None
        for candidate in candidates:
            self._streams[candidate.request_id].got_to(candidate.start)
        for head in self._order.heads() if candidates else ():
            places = [(stream.place, stream.num_scheduled) for stream in head]
            ranks = rank_times(places, now, self._patience, self._prefill_seconds)
            for stream, rank in zip(head, ranks, strict=True):
                stream.rank = rank, stream.rank[1]
        self._order.demote_late(now)
        decoding = [decode for decode in decodes if decode.rows]
        urgent = urgency([self._streams[decode.request_id].deadline for decode in decoding], self._pacing)
        target = urgent.tightest_target
        view = StepView(
            now=now,
            num_in_flight=self._in_flight.num_steps,
            num_decodes=sum(decode.rows for decode in decoding),
            decode_context=sum(decode.rows * decode.context for decode in decoding),
            earliest_deadline=urgent.earliest_deadline,
            tightest_target=None if target is None else target / self._host.num_stages,
            overhead=0.0,  # a step's seconds are counted from before it is planned
            step_time=self.step_time,
            max_num_seqs=self._host.max_num_seqs,
            candidates=candidates,
            free_tokens=free_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            caps=self._host.caps,
            turn=self._order.length_of_turn([(self._streams[one.request_id], one.start) for one in candidates]),
        )
        quotas = self._planner.plan(view).chunks
        if (feasible := self._planner.infeasibility_warning()) is not None:
            self._host.logger.warning(
                "evenflow: a target of %g ms is infeasible beside prefill. The lowest feasible target is %.4g ms.",
                1000 * self._pacing.target,
                1000 * self._of_all_stages(feasible),
            )
        return view.num_decodes, quotas

    def _of_all_stages(self, seconds: float) -> float:
        """A target for streams, from one for the steps that give them each token."""
        return round_up(self._host.num_stages * seconds)

    # ---- after a step ----

    def scheduled(self, step: InFlightStep, num_decodes: int, decode_context: int, num_ended: int) -> None:
        """The host scheduled this step; `step.chunks` are set. `num_ended`: chunks that end their prompt."""
        step.admissions = list(self._admit(step.chunks))
        if num_decodes or step.chunks:
            step.shape = self._host.caps.step_shape(
                num_decodes=num_decodes,
                decode_context=decode_context,
                chunks=[(start, length) for _, start, length in step.chunks],
                prefill_logit_rows=num_ended,
            )
            step.predicted = self.step_time.predict(step.shape)
        if step.shape is not None:
            self._charge(step, decode_context // max(1, num_decodes))
        step.launched_at = self.clock()  # unless the host says when it has
        self._in_flight.add(step)

    def _charge(self, step: InFlightStep, mean_context: int) -> None:
        """What the step gives to each prompt and each account."""
        streams = self._streams
        chunks = [(streams[one], start, length) for one, start, length in step.chunks if one in streams]
        for stream, start, length in chunks:
            stream.got_to(start + length)
        if chunks:
            lengths = [(stream, length) for stream, _, length in chunks]
            self._order.charge_overtaking(list(self._order.heads()), lengths, step.predicted)
        if self._order.is_shared:
            decodes = [(streams[one].account, mean_context) for one in step.decode_ids if one in streams]
            parts = [(stream.account, start, length) for stream, start, length in chunks]
            if decodes or parts:
                prices = step_prices(self.step_time, self._host.caps, decodes, parts, step.predicted)
                self._order.charge(prices)
        else:
            self._order.charge_only(step.predicted)

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
        late = [one for request_id in tokens if (one := self._emit(request_id, tokens[request_id], step.ended_at))]
        if len(self._streams) > len(open_requests):
            for request_id in self._streams.keys() - open_requests.keys():
                stream = self._streams.pop(request_id)
                self._order.discard(stream)
                self._reporter.left(request_id, stream.num_output_tokens)
        self._num_steps += 1
        self._reporter.report(self._report(step, tokens, late, load))

    def _emit(self, request_id: str, tokens: Sequence[int], now: float) -> LateToken | None:
        stream = self._streams[request_id]
        stream.num_output_tokens += len(tokens)
        return None if self._pacing is None else stream.deadline.emit(request_id, self._pacing, now)

    def _report(
        self, step: InFlightStep, tokens: Mapping[str, Sequence[int]], late: list[LateToken], load: HostLoad
    ) -> StepReport:
        assert step.shape is not None
        times = self._attribution.split(
            step.ended_at,
            step.seconds,
            step.predicted,
            [
                self._host.caps.step_shape(
                    num_decodes=step.shape.decode_sequences,
                    decode_context=step.shape.decode_context,
                    chunks=[(start, length) for _, start, length in step.chunks[:num_chunks]],
                )
                for num_chunks in range(len(step.chunks) + 1)
            ],
            [(request_id, length) for request_id, _, length in step.chunks],
        )
        decoded = [request_id for request_id in tokens if request_id in step.decode_ids]
        ids = decoded + [request_id for request_id in tokens if request_id not in step.decode_ids]
        feasible = self._planner.feasible_target if self._planner is not None else None
        return StepReport(
            step_id=self._num_steps,
            at=step.ended_at,
            seconds=step.seconds,
            predicted_seconds=step.predicted,
            decode_seconds=times.decode_seconds,
            num_decodes=step.shape.decode_sequences,
            chunks=[
                ChunkReport(*chunk, step.reasons.get(chunk[0], ChunkReason.BUDGET), seconds, chunk[0] in tokens)
                for chunk, seconds in zip(step.chunks, times.chunk_seconds, strict=True)
            ],
            admissions=step.admissions,
            causes=times.causes,
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

    def save(self) -> None:
        """Keep the step times for the next start."""
        self._learn()
        if self.step_time.is_calibrated:
            self.keep_step_times()

    def keep_step_times(self) -> None:
        save_step_times(self.step_time, self._host.step_times_path)

    def close(self) -> None:
        self.save()
        self._reporter.close()
