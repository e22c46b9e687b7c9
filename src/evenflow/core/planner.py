"""The planner: whom the next step serves, how much prefill it takes, and what it costs each account.

evenflow's scheduler and the steering inside host engines each drive one. Memory, slots and counters are the
scheduler's, and what a host is, the steering's. Nothing here waits, reads a clock or draws a random number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from evenflow.core.account import Account
from evenflow.core.deadlines import LateToken, Pacing, Place, StreamDeadline, emit, urgency
from evenflow.core.plan import StepShape
from evenflow.core.policies import PolicySpec
from evenflow.core.policy import Candidate, Policy, Quotas, StepView
from evenflow.core.prices import Prices
from evenflow.core.service_classes import ServiceClass, find_class
from evenflow.core.service_lines import Served, ServiceLines
from evenflow.core.step_time import StepTimeModel


class Planned(Served, Protocol):
    """What the planner looks at in a request."""

    deadline: StreamDeadline
    place: Place


RequestType = TypeVar("RequestType", bound=Planned)


class Planner(Generic[RequestType]):
    """Policy, step times, order of service and deadlines of one engine's requests."""

    def __init__(
        self,
        order: ServiceLines[RequestType],
        prices: Prices,
        policy: PolicySpec,
        *,
        max_num_seqs: int,
        num_stages: int = 1,  # of a pipeline: a stream's next token takes this many steps
    ) -> None:
        self.order = order
        self.prices = prices
        self.requests: dict[str, RequestType] = {}  # unfinished
        self._max_num_seqs = max_num_seqs
        self._num_stages = num_stages
        self._num_arrivals = 0
        self.set_policy(policy)

    def set_policy(self, spec: PolicySpec) -> None:
        """Plan by another policy from now on."""
        self.pacing: Pacing | None = None  # of streams
        if spec.pacing is not None:  # until it is known what is feasible, no stream is promised more than the others
            self.pacing = replace(spec.pacing, feasible=math.inf)
        of_steps = spec
        if spec.target is not None:
            of_steps = replace(spec, seconds=spec.target / self._num_stages, written="")
        self.policy: Policy = of_steps.build()
        for request in self.requests.values():
            request.deadline.restart(self.pacing)
        self._is_ranked = False  # by predictions that hold

    @property
    def step_time(self) -> StepTimeModel:
        return self.prices.step_time

    # ---- requests come and go ----

    def place(
        self, request: RequestType, num_cached_tokens: int, tbt_target: float | None, ttft_target: float | None
    ) -> ServiceClass:
        """Find a new request's class and its place in line, which it has not taken yet."""
        of_class = find_class(self.order.classes, request.service_class or None)
        request.deadline.own_target = tbt_target or of_class.tbt_seconds
        ttft_target = ttft_target or of_class.ttft_seconds
        request.place = Place(request.arrival_time, request.num_known, num_cached_tokens, ttft_target)
        request.rank = self._due(request.place), self._num_arrivals
        return of_class

    def _due(self, place: Place) -> float:
        if not self.policy.patience:
            return place.arrival_time
        start = place.num_cached_tokens
        return place.due(self.policy.patience * self.prices.seconds(start, place.num_tokens - start))

    def arrived(self, request: RequestType) -> None:
        """It takes its place."""
        self._num_arrivals += 1
        self.requests[request.id] = request
        self.order.add(request)

    def left(self, request: RequestType) -> None:
        """It has ended."""
        del self.requests[request.id]
        self.order.discard(request)

    # ---- a step ----

    def line_up(self, now: float) -> None:
        """Bring the lines up to date: late prompts make way, and ranks follow what the first steps teach."""
        if not self._is_ranked:
            for request in self.requests.values():
                self.order.update(request, (self._due(request.place), request.rank[1]))
            self._is_ranked = self.step_time.is_calibrated or not self.policy.patience
        self.order.demote_late(now)

    def plan(
        self,
        now: float,
        streams: Iterable[RequestType],  # that decode
        prompts: Sequence[Candidate],  # in order of service
        *,
        num_decodes: int,  # rows: more than streams where tokens are speculated
        decode_context: int,
        num_in_flight: int,
        overhead: float,
        free_tokens: int,
        long_prefill_token_threshold: int,
    ) -> Quotas:
        """How much of which prompts the next step takes. Without prompts, it only tells the policy of the step."""
        earliest = tightest = None
        if self.pacing is not None and prompts:  # else nothing depends on them
            earliest, tightest = urgency(streams, self.pacing)
        view = StepView(
            now=now,
            num_in_flight=num_in_flight,
            num_decodes=num_decodes,
            decode_context=decode_context,
            earliest_deadline=earliest,
            tightest_target=None if tightest is None else tightest / self._num_stages,
            overhead=overhead,
            step_time=self.step_time,
            max_num_seqs=self._max_num_seqs,
            candidates=prompts,
            free_tokens=free_tokens,
            long_prefill_token_threshold=long_prefill_token_threshold,
            caps=self.prices.caps,
            turn=self.order.length_of_turn([(self.requests[one.request_id], one.start) for one in prompts]),
        )
        quotas = self.policy.plan(view)
        feasible = self._num_stages * self.policy.shortest_step
        if self.pacing is not None and feasible != self.pacing.feasible:
            self.pacing = replace(self.pacing, feasible=feasible)
        return quotas

    def charge(
        self,
        streams: Iterable[tuple[Account, int]],  # with the positions that each attends to
        chunks: Sequence[tuple[RequestType, int, int]],  # with start and length
        num_rows: int,
        seconds: float,  # predicted
    ) -> None:
        """Charge each account its part of a step, and update the ranks of the prompts in it."""
        if not num_rows:
            return
        if self.policy.patience:  # as a prompt is served, what is predicted of it improves
            for request in (one for one, _, _ in chunks if one.is_running):
                request.rank = self._due(request.place), request.rank[1]
        if self.order.is_shared:
            parts = [(request.account, start, length) for request, start, length in chunks]
            self.order.charge(self.prices.of_accounts(streams, parts, seconds))
        else:
            self.order.charge_only(seconds or self.prices.nominal(num_rows))

    def emitted(self, requests: Iterable[RequestType], now: float) -> list[LateToken]:
        """These got tokens now; returns those that are late."""
        return [] if self.pacing is None else emit(requests, self.pacing, now)

    def observe(self, shapes: Sequence[StepShape], seconds: float, launches: Sequence[float] = ()) -> None:
        """Learn from steps whose seconds are known, together or alone."""
        self.step_time.observe(shapes, seconds, launches)
        if len(shapes) == 1:
            self.policy.observe(shapes[0], seconds)
