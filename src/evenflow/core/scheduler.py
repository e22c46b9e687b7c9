"""Turns requests into steps: `schedule` plans one and advances the counters, `commit` takes in its result.

In between a step is in flight, and the next may be planned already; see `ExecutorCaps.max_steps_in_flight`. Nothing
here waits, reads a clock or draws a random number: the same calls give the same plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, repeat

from evenflow.core.account import PROMOTED
from evenflow.core.block_moves import BlockMover
from evenflow.core.blocks import BlockPool
from evenflow.core.deadlines import (
    LateToken,
    Place,
    Urgency,
    rank_time,
    urgency,
)
from evenflow.core.holdings import Holdings
from evenflow.core.plan import (
    Admission,
    BlockTableChange,
    Chunk,
    Decodes,
    ExecutorCaps,
    StepPlan,
    StepResult,
    StepShape,
)
from evenflow.core.policies import DEFAULT_POLICY, PolicySpec
from evenflow.core.policy import Candidate, Quota, StepView
from evenflow.core.prefill_pace import PrefillPace
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.prices import context_price, nominal_price, prefill_price, step_prices
from evenflow.core.recovery import Recovery
from evenflow.core.request import FinishReason, Request, Status
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, ServiceClass, find_class
from evenflow.core.service_order import ServiceOrder, Start
from evenflow.core.step_time import StepTimeModel
from evenflow.core.tier import Tier, TierConfig
from evenflow.errors import DeadlineExceeded, InvalidRequest, LateRequest

# Waiting requests that are looked at behind one that does not fit.
_MAX_TRIED = 32
# When memory runs out, this share of the KV blocks goes out of service, down to half of them in all.
_RETIRED_SHARE = 1 / 8
# Under a target, the most of it that a tenant's streams take for reading their contexts, while others are served too.
_MAX_CONTEXT_SHARE = 0.15
# Steps without prefill, and with a prompt that fits, after which something is wrong: policies wait for 8 at most.
_MAX_STEPS_WITHOUT_PREFILL = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Everything a scheduler's decisions depend on, besides its calls and the executor's caps."""

    num_blocks: int
    policy: PolicySpec = DEFAULT_POLICY
    block_size: int = 16
    max_num_seqs: int = 256
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    classes: Classes = DEFAULT_CLASSES
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    tier: TierConfig | None = None  # None: what is evicted is computed again


# A request, its index in the StepResult, its new tokens. A NamedTuple would make a decode cost a fifth more here.
Emission = tuple[Request, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of a step: which requests got tokens, which ended, and which are computed again after a fault."""

    plan: StepPlan
    result: StepResult
    emissions: list[Emission]
    finished: list[Request]
    shape: StepShape
    predicted_seconds: float
    late: list[LateToken] = field(default_factory=list)
    retried: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _InFlight:
    plan: StepPlan
    shape: StepShape
    predicted_seconds: float
    planned_at: float
    sequences: list[Request]  # decodes, then chunks, as in the plan


class Scheduler:
    """Owns the requests, blocks and slots of one engine."""

    def __init__(
        self, config: SchedulerConfig, caps: ExecutorCaps | None = None, *, step_time: StepTimeModel | None = None
    ) -> None:
        self.config = config
        self.caps = caps or ExecutorCaps()
        self.policy = config.policy.build()
        self.block_size = config.block_size
        caches = config.enable_prefix_caching
        self.tier = tier = Tier(config.tier, config.tenant_weights) if config.tier is not None and caches else None
        listeners = (tier.take, tier.offer) if tier is not None else ()
        self.pool = BlockPool(config.num_blocks, config.tenant_weights, *listeners)
        self.prefix_cache = PrefixCache(self.pool, config.block_size, enabled=caches, tier=self.tier)
        self._mover = BlockMover(self.pool, self.prefix_cache, tier, config.block_size, self._prefill_price)
        self.order = ServiceOrder(config.classes, config.tenant_weights, self._prefill_price)
        self._pace = PrefillPace(self._prefill_price)
        self._is_paced = any(one.refuse_late for one in config.classes)  # else from the first deadline on
        self.requests: dict[str, Request] = {}  # unfinished
        self._expiring: dict[str, Request] = {}  # those of them that have a deadline
        self._next_expiry = math.inf  # no deadline passes before
        self._prefilling: dict[str, Request] = {}  # running, in order of admission
        self._decoding: dict[str, Request] = {}  # running, with exactly one token to feed
        self._decode_columns: Decodes | None = None  # of all of `_decoding`, until that changes
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._released_slots: list[int] = []  # for the next plan
        self.step_time = step_time or StepTimeModel()  # learns under every policy
        self._overheads: deque[float] = deque(maxlen=16)  # recent seconds of steps, less the run itself
        self._committed_at = -math.inf
        self._in_flight: deque[_InFlight] = deque()
        self._next_step_id = 0
        self._num_arrivals = 0
        self._at_limit: set[str] = set()  # tenants whose prompts do not start in this step
        self._passing: dict[str, Request] = {}  # who may pass in this step, each with the one that does not fit
        self._recovery = Recovery()
        self._table_changes: list[BlockTableChange] = []  # not sent yet
        self._steps_without_prefill = 0  # in a row, while requests wait and none for the tier

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        if request.id in self.requests:
            raise InvalidRequest(f"Got request id {request.id!r} but an unfinished request has the same id.")
        capacity = self.pool.num_blocks * self.block_size
        if request.max_known_tokens > capacity:
            raise InvalidRequest(
                f"Got a request of up to {request.max_known_tokens} tokens (prompt {request.num_prompt_tokens}) "
                f"but the KV cache holds {capacity}."
            )
        service_class = find_class(self.order.classes, request.service_class or None)
        request.deadline.own_target = request.sampling.tbt_target or service_class.tbt_target
        request.rank = (request.arrival_time, self._num_arrivals)
        needs_cached = self.policy.patience or service_class.refuse_late or request.sampling.deadline is not None
        num_cached = self.prefix_cache.count_published(request) if needs_cached else 0
        ttft_target = request.sampling.ttft_target or service_class.ttft_target
        request.place = Place(request.arrival_time, request.num_known, num_cached, ttft_target)
        if self.policy.patience:
            request.rank = self._rank(request, request.arrival_time)
        self._refuse_if_late(request, service_class)
        self.order.add(request)
        self._num_arrivals += 1
        self.requests[request.id] = request
        self.pool.saw(request.tenant, request.arrival_time)
        if self.tier is not None:
            self.tier.saw(request.tenant, request.arrival_time)
        self.order.push(request)
        if request.sampling.deadline is not None:
            self._is_paced = True
            self._expiring[request.id] = request
            self._next_expiry = min(self._next_expiry, request.expires_at)

    def _refuse_if_late(self, request: Request, service_class: ServiceClass) -> None:
        """Refuse what would end without an answer, and what its class does not take: the earlier, the better."""
        deadline = request.sampling.deadline
        target = request.place.ttft_target if service_class.refuse_late else None
        if deadline is None and target is None:
            return
        expected = self._pace.seconds(self.order.seconds_before(request))
        if deadline is not None and expected > deadline:
            raise LateRequest(expected, deadline, is_deadline=True)
        if target is not None and expected > target:
            raise LateRequest(expected, target)

    def expire(self, now: float) -> dict[str, DeadlineExceeded]:
        """End requests whose deadlines have passed, waiting or running: nobody wants their answers any more."""
        if now < self._next_expiry:
            return {}
        found: dict[str, DeadlineExceeded] = {}
        for request in [one for one in self._expiring.values() if one.expires_at <= now]:
            deadline_s = request.sampling.deadline or 0.0
            error = found[request.id] = DeadlineExceeded(deadline_s, request.num_output_tokens)
            request.error = str(error)
            self._end(request, FinishReason.ERROR)
        self._next_expiry = min((one.expires_at for one in self._expiring.values()), default=math.inf)
        return found

    def _rank(self, request: Request, now: float) -> tuple[float, int]:
        """Its place in line, by what its prefill is predicted to take now."""
        place = request.place
        start = request.num_scheduled if request.status is Status.RUNNING else place.num_cached_tokens
        return rank_time(place, start, now, self.policy.patience, self._prefill_seconds), request.rank[1]

    def _prefill_seconds(self, start: int, length: int) -> float:
        return self.step_time.predict(self.caps.prefill_shape(start, length))

    def _prefill_price(self, start: int, length: int) -> float:
        return prefill_price(self.step_time, self.caps, start, length)

    def _heads_of_lines(self, now: float) -> list[list[Request]]:
        """Of each account, the earliest prompts that have no token yet, with their current ranks."""
        heads = list(self.order.heads())
        for request in chain.from_iterable(heads):
            if request.status is Status.RUNNING:
                request.rank = self._rank(request, now)
            else:
                self.order.update(request, self._rank(request, now))
        return heads

    def abort(self, request_id: str) -> bool:
        """End a request at any moment. False if it has ended already."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason, keep: int | None = None) -> bool:
        """End a request, keeping its first `keep` output tokens (all by default)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        if keep is not None:
            del request.tokens[request.num_prompt_tokens + keep :]
        self._end(request, reason)
        return True

    def set_policy(self, policy: PolicySpec) -> None:
        """Use another policy from the next step on. Requests and steps in flight are unaffected."""
        self.policy = policy.build()
        self._bound_steps()
        for request in self.requests.values():
            request.deadline.restart(self.policy.pacing)
        self.config = replace(self.config, policy=policy)

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self._in_flight) or self._mover.needs_step

    @property
    def waiting(self) -> ServiceOrder:
        """Requests that wait for a slot, in order of service."""
        return self.order

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def upper_seconds_in_flight(self) -> float:
        """Seconds that the steps in flight rarely exceed together; 0: nothing is known."""
        return sum([self.step_time.upper(step.shape) for step in self._in_flight])

    @property
    def can_schedule(self) -> bool:
        return len(self._in_flight) < self.caps.max_steps_in_flight

    @property
    def overhead(self) -> float:
        """Recent per-step overhead; ignores the two largest."""
        return sorted(self._overheads)[-min(3, len(self._overheads))] if self._overheads else 0.0

    # ---- planning a step ----

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if nothing can run before the next commit or arrival."""
        if not self.can_schedule:
            raise RuntimeError(f"{len(self._in_flight)} steps are in flight, the most that this executor allows")
        self._mover.start_step()
        yielded: set[str] = set()
        self._at_limit = set()
        if self.order:
            self.order.demote_late(now)
            self._at_limit = self._tenants_at_limit()
            yielded = self._make_way()
        decodes = self._secure_decodes()
        has_prompts = bool(self._prefilling or self.order)
        heads = self._heads_of_lines(now) if self.policy.patience and has_prompts else []
        candidates = self._candidates(yielded)
        if self._recovery.suspects:
            decodes, candidates = self._recovery.turn(decodes, candidates)
        positions = [request.num_scheduled for request in decodes]
        quotas = self.policy.plan(self._view(now, decodes, positions, candidates))
        if not quotas.run_decodes:
            decodes, positions = [], []
        if not decodes and not quotas.chunks and (self._in_flight or not self._mover.needs_step):
            return None
        step_id = self._next_step_id
        self._next_step_id += 1
        released, self._released_slots = tuple(self._released_slots), []
        left_out = len(self._decoding) - len(decodes)
        columns = self._take_decodes(decodes, positions)
        admissions: list[Admission] = []
        prefills = [self.requests[candidates[quota.candidate].request_id] for quota in quotas.chunks]
        chunks = [
            self._take_chunk(request, quota, admissions) for request, quota in zip(prefills, quotas.chunks, strict=True)
        ]
        plan = StepPlan(
            step_id=step_id,
            released_slots=released,
            admissions=tuple(admissions),
            block_changes=self._take_table_changes(
                {*columns.slots, *(one.slot for one in chunks)} if left_out else None
            ),
            decodes=columns,
            chunks=tuple(chunks),
            padded_rows=self.caps.padded_rows(len(columns) + sum(quota.tokens for quota in quotas.chunks)),
            moves=self._mover.take_moves(),
        )
        shape = plan.shape(self.caps)
        predicted = self.step_time.predict(shape)
        if chunks:
            lengths = [(request, chunk.length) for request, chunk in zip(prefills, chunks, strict=True)]
            self.order.charge_overtaking(heads, lengths, predicted)
        if self.order.is_shared and plan.num_sequences:
            self._charge(decodes, positions, prefills, chunks, predicted)
        elif plan.num_sequences:
            self.order.charge_only(predicted or nominal_price(plan.num_rows))
        has_reason = chunks or not self.order or self._mover.is_restoring
        self._steps_without_prefill = 0 if has_reason else self._steps_without_prefill + 1
        self._in_flight.append(_InFlight(plan, shape, predicted, now, decodes + prefills))
        return plan

    def _view(
        self, now: float, decodes: Sequence[Request], positions: Sequence[int], candidates: Sequence[Candidate]
    ) -> StepView:
        pacing = self.policy.pacing
        urgent = urgency([request.deadline for request in decodes], pacing) if pacing else Urgency(None, None)
        return StepView(
            now=now,
            num_in_flight=len(self._in_flight),
            num_decodes=len(decodes),
            decode_context=sum(positions) + len(decodes),
            earliest_deadline=urgent.earliest_deadline,
            tightest_target=urgent.tightest_target,
            overhead=self.overhead,
            step_time=self.step_time,
            max_num_seqs=self.config.max_num_seqs,
            candidates=candidates,
            free_tokens=self.pool.num_free * self.block_size,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            caps=self.caps,
        )

    def admission_failure(self) -> str | None:
        """What is wrong if nothing is admitted although it could be; None if all is well."""
        if self._steps_without_prefill < _MAX_STEPS_WITHOUT_PREFILL:
            return None
        first = next(self.order.waiting_but(self._at_limit), None)
        if first is None:
            return None
        slots_kept, blocks_kept = self._reserve(first, self.num_running)
        needed, _ = self._blocks_to_admit(first)
        if len(self._free_slots) <= slots_kept or needed + self.num_running + blocks_kept > self.pool.num_free:
            return None  # it does not fit
        return (
            f"no prompt was computed in {self._steps_without_prefill} steps although the next one fits: "
            f"{len(self._free_slots)} slots and {self.pool.num_free} KV blocks are free, {len(self.order)} wait"
        )

    def _charge(
        self,
        decodes: Sequence[Request],
        positions: Sequence[int],
        prefills: Sequence[Request],
        chunks: Sequence[Chunk],
        seconds: float,
    ) -> None:
        streams = [(request.account, position + 1) for request, position in zip(decodes, positions, strict=True)]
        parts = [(one.account, chunk.start, chunk.length) for one, chunk in zip(prefills, chunks, strict=True)]
        self.order.charge(step_prices(self.step_time, self.caps, streams, parts, seconds))

    def _take_table_changes(self, slots: Set[int] | None) -> tuple[BlockTableChange, ...]:
        """Those of these slots, None: of all. A step that fails may not apply them, so it gets no others."""
        changes = self._table_changes
        self._table_changes = [] if slots is None else [change for change in changes if change.slot not in slots]
        return tuple(changes if slots is None else [change for change in changes if change.slot in slots])

    def _secure_decodes(self) -> list[Request]:
        """The requests that decode in this step, each with a block for its next token; preempts if blocks run out."""
        block_size = self.block_size
        full = [r for r in self._decoding.values() if r.num_scheduled == len(r.block_ids) * block_size]
        without_block: set[str] = set()
        secured: set[str] = set()
        for request in self.order.by_urgency(full):
            if request.status is not Status.RUNNING or request.num_unscheduled == 0:
                continue
            if self._make_room(request, secured):
                self._append_blocks(request, 1)
                secured.add(request.id)
            else:
                without_block.add(request.id)
        if not self._in_flight and not without_block:
            return list(self._decoding.values())
        # With a step in flight, a request's last allowed token can be pending already.
        return [
            r for r in self._decoding.values() if r.num_scheduled < r.max_known_tokens - 1 and r.id not in without_block
        ]

    def _make_room(self, request: Request, secured: Set[str]) -> bool:
        """Free a block for `request` by preempting those that yield to it; False if it must wait or yields itself.

        Those that have got their block for this step keep it.
        """
        while self.pool.num_free == 0:
            if self.pool.num_settling:
                return False  # blocks come free when a step in flight is committed
            running = [one for one in self._running() if one.id not in secured]
            first = self.order.first_to_yield(running, self._holdings)
            self._preempt(first)
            if first is request:
                return False
        return True

    def _running(self) -> list[Request]:
        return [*self._prefilling.values(), *self._decoding.values()]

    def _holdings(self) -> Holdings:
        return Holdings(self._running(), self.config.max_num_seqs, self.pool.num_blocks, self.block_size)

    def _tenants_at_limit(self) -> set[str]:
        """Tenants whose streams take so much of the target that prompts of others would get too little of it."""
        if self.policy.pacing is None or not self.order.is_contended:
            return set()
        positions: dict[str, list[int]] = {}
        for request in self._running():
            positions.setdefault(request.tenant, []).append(request.num_known)
        most = _MAX_CONTEXT_SHARE * self.policy.pacing.target
        return {
            tenant
            for tenant, of_tenant in positions.items()
            if context_price(self.step_time, self.caps, len(of_tenant), sum(of_tenant)) > most
        }

    def _make_way(self) -> set[str]:
        """Preempt requests that yield to waiting ones, for as many of these as one step can take; returns their ids."""
        yielded: set[str] = set()
        if not self.order.is_shared:
            return yielded
        claimed, slots, tokens = self.num_running, len(self._free_slots), 0
        for request in list(islice(self.order.waiting_but(self._at_limit), self.caps.max_prefill_sequences)):
            slots_kept, blocks_kept = self._reserve(request, claimed)
            needed = self._num_blocks(request.num_known)
            if slots <= slots_kept or needed + claimed + blocks_kept > self.pool.num_free:
                needed, cached = self._blocks_to_admit(request)
                if self._is_pending(self.prefix_cache.first_missing(request, len(cached)), request):
                    continue
                lacking = needed + claimed + blocks_kept - self.pool.num_free - self.pool.num_settling
                if slots <= slots_kept or lacking > 0:
                    victims = self._victims(request, lacking)
                    if not victims:
                        break
                    for victim in victims:
                        self._preempt(victim)
                        yielded.add(victim.id)
                    slots += len(victims)
                    claimed -= len(victims)
            slots -= 1
            claimed += needed + 1
            tokens += request.num_known - request.place.num_cached_tokens
            if tokens >= self.policy.max_step_tokens:
                break
        return yielded

    def _victims(self, request: Request, num_blocks: int) -> list[Request]:
        """Requests that yield a slot and this many blocks to a waiting one; none if all of them were not enough."""
        victims: list[Request] = []
        for victim in self.order.yielding(request, self._running(), self._holdings()):
            victims.append(victim)
            num_blocks -= self.pool.count_sole(victim.block_ids) + 1  # and the one that it reserves
            if num_blocks <= 0:
                return victims
        return []

    def _candidates(self, yielded: Set[str]) -> list[Candidate]:
        """Prompts to continue and prompts that could start, in order of service, as many as fit in one step."""
        if not self._prefilling and not self.order:
            return []
        room = self.caps.max_prefill_sequences
        starts = [(request, request.num_scheduled) for request in self._prefilling.values()]
        starts += islice(self._admissible(yielded), room)
        return [
            Candidate(request.id, start, request.num_known - start, request.num_prompt_tokens)
            for request, start in self.order.arrange(starts, room)
        ]

    def _admissible(self, yielded: Set[str]) -> Iterator[Start]:
        """Waiting requests that fit in the free slots and blocks, each with its number of cached tokens.

        Each running request reserves one more block: otherwise a new one would soon preempt it. Of those behind the
        first that does not fit, a few may pass; see `_may_pass`. Those that have `yielded` for this step do not come
        back in it.
        """
        self._passing.clear()
        if not self.pool.num_free:
            return
        claimed, slots, tried = self.num_running, len(self._free_slots), 0
        starting: set[bytes] = set()  # the first blocks that requests ahead in line would compute
        blocked: Request | None = None
        for request in self.order.waiting_but(self._at_limit):
            slots_kept, blocks_kept = self._reserve(request, claimed)
            if slots <= slots_kept or tried > _MAX_TRIED:
                return
            if blocked is not None:
                tried += 1
                if not self._may_pass(request, blocked):
                    if request.account == blocked.account:
                        continue  # one that needs less may
                    return
            if request.id in yielded:
                continue
            needed, cached = self._blocks_to_admit(request)
            missing = self.prefix_cache.first_missing(request, len(cached))
            if missing is not None:
                if missing in starting or self._is_pending(missing, request):
                    continue  # waiting for it is cheaper than computing it twice
                starting.add(missing)
            request.place.num_cached_tokens = len(cached) * self.block_size
            if needed + claimed + blocks_kept > self.pool.num_free:
                blocked = blocked or request
                continue
            claimed += needed + 1
            if self._mover.delays(request, cached):
                continue
            if blocked is not None:
                self._passing[request.id] = blocked
            yield request, len(cached) * self.block_size
            slots -= 1

    def _may_pass(self, request: Request, blocked: Request) -> bool:
        """May it take memory although `blocked`, which is ahead in line, does not fit?

        Tenants that hold less may. So may requests of the same account, as long as all that do need no more tokens to
        their ends than the blocked one: memory that would be idle is used, and it waits for little more.
        """
        if request.account != blocked.account:
            return self.order.may_pass(request, blocked, self._holdings())
        passing = sum(self.requests[name].max_known_tokens for name, one in self._passing.items() if one is blocked)
        return blocked.place.passed_tokens + passing + request.max_known_tokens <= blocked.max_known_tokens

    def _blocks_to_admit(self, request: Request) -> tuple[int, list[int]]:
        """How many free blocks its admission takes, and those that hold its cached prefix."""
        cached = self.prefix_cache.find(request)
        return self._num_blocks(request.num_known) - len(cached) + self.pool.count_idle(cached), cached

    def _is_pending(self, block_hash: bytes | None, request: Request) -> bool:
        """Will this block be there soon? Not from a prompt that yields to the one that wants it."""
        if block_hash is None or not self.prefix_cache.is_expected(block_hash):
            return False
        producer = self.requests.get(self.prefix_cache.producer(block_hash) or "")
        return producer is None or not self.order.goes_before(request, producer)

    def _reserve(self, request: Request, num_claimed: int) -> tuple[int, int]:
        """Slots and blocks that its class leaves to the decodes of others, while any of them runs."""
        share = self.order.spec_of(request).reserve
        if not share or not num_claimed or request.account.level == PROMOTED:
            return 0, 0
        return int(share * self.config.max_num_seqs), int(share * self.pool.num_blocks)

    def _take_decodes(self, decodes: Sequence[Request], positions: Sequence[int]) -> Decodes:
        for request in decodes:
            request.num_scheduled += 1
            request.num_pending += 1
        all_decode = len(decodes) == len(self._decoding)
        columns = self._decode_columns if all_decode else None
        if columns is None:
            columns = Decodes(
                request_ids=tuple([r.id for r in decodes]),
                epochs=tuple([r.epoch for r in decodes]),
                slots=tuple([r.slot for r in decodes]),
            )
        self._decode_columns = columns if all_decode else None
        return replace(columns, positions=tuple(positions))

    def _take_chunk(self, request: Request, quota: Quota, admissions: list[Admission]) -> Chunk:
        if request.status is not Status.RUNNING:
            admissions.append(self._admit(request))
        start = request.num_scheduled
        request.num_scheduled = end = start + quota.tokens
        samples = end == request.num_known
        if samples:
            request.num_pending += 1
            del self._prefilling[request.id]
            self._decoding[request.id] = request
            self._decode_columns = None
        return Chunk(
            request_id=request.id,
            epoch=request.epoch,
            slot=request.slot,
            start=start,
            length=quota.tokens,
            reason=quota.reason,
            samples=samples,
            prompt_logprobs=request.sampling.prompt_logprobs is not None and request.num_output_tokens == 0,
        )

    def _admit(self, request: Request) -> Admission:
        """Give a waiting request a slot and blocks for all its known tokens."""
        if (passed := self._passing.get(request.id)) is not None and passed.account == request.account:
            passed.place.passed_tokens += request.max_known_tokens
        self.order.remove(request)
        cached = self.prefix_cache.find(request)
        self.pool.hold(cached)
        request.slot = self._free_slots.pop()
        request.status = Status.RUNNING
        request.num_cached_tokens = request.place.num_cached_tokens = len(cached) * self.block_size
        request.num_scheduled = request.num_committed = request.num_cached_tokens
        self._append_blocks(request, self._num_blocks(request.num_known) - len(cached), cached)
        self._prefilling[request.id] = request
        self.prefix_cache.start_computing(request)
        return Admission(
            request_id=request.id,
            epoch=request.epoch,
            slot=request.slot,
            token_ids=tuple(request.tokens),
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            max_known_tokens=request.max_known_tokens,
            sampling=request.sampling,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
        )

    def _append_blocks(self, request: Request, count: int, cached: Sequence[int] = ()) -> None:
        """New blocks at the end of its table, after the cached ones that it starts with."""
        blocks = [*cached, *self.pool.allocate(count)]
        self._table_changes.append(BlockTableChange(request.slot, len(request.block_ids), tuple(blocks)))
        request.block_ids += blocks

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- taking in a step's result ----

    def commit(self, result: StepResult, now: float) -> Committed:
        """Take in the result of the oldest step in flight, except for requests that have left their slot since."""
        step = self._in_flight.popleft()
        plan = step.plan
        if result.step_id != plan.step_id or len(result.tokens) != plan.num_sequences:
            raise RuntimeError(f"step {plan.step_id} is the oldest in flight, not step {result.step_id} of this result")
        outcome = Committed(plan, result, [], [], step.shape, step.predicted_seconds)
        epochs = [*plan.decodes.epochs, *(chunk.epoch for chunk in plan.chunks)]
        for index, message in result.errors.items():
            request = step.sequences[index]
            if request.epoch == epochs[index]:
                request.error = message
                self._end(request, FinishReason.ERROR)  # starts an epoch: `_advance` drops the row
                outcome.finished.append(request)
        if result.faults:
            self._take_faults(step.sequences, epochs, outcome)
        self._advance(step.sequences, epochs, outcome)
        if self._recovery.suspects:
            for request, _, tokens in outcome.emissions:
                if tokens:
                    self._recovery.gave_token(request.id)
        self.pool.settle(plan.step_id)
        self._mover.commit(result.tier)
        if (pacing := self.policy.pacing) is not None:
            for request, _, tokens in outcome.emissions:
                if tokens and (late := request.deadline.emit(request.id, pacing, now)) is not None:
                    outcome.late.append(late)
        if not result.errors and not result.faults and plan.num_sequences:
            self.step_time.observe(step.shape, result.seconds)
            self.policy.observe(step.shape, result.seconds)
            if self._is_paced and plan.chunks and step.predicted_seconds:
                self._pace.observe(plan.chunks, result.seconds + self.overhead)
        if plan.num_sequences:
            # A step that was planned behind another one also waited for that.
            began = max(step.planned_at, self._committed_at)
            self._overheads.append(max(0.0, now - began - result.seconds))
        self._committed_at = now
        return outcome

    def _take_faults(self, sequences: Sequence[Request], epochs: Sequence[int], outcome: Committed) -> None:
        """Compute again the requests whose rows were lost, or end them if they have failed before."""
        result, num_rows = outcome.result, outcome.plan.num_rows
        has_shrunk = result.out_of_memory and self._recovery.shrink(min(num_rows, self.policy.max_step_tokens))
        is_shared = len(sequences) > 1 and len(result.faults) == len(sequences)
        for index, message in result.faults.items():
            request = sequences[index]
            if request.epoch != epochs[index]:
                continue
            if not result.out_of_memory:
                self._mover.forget(request.block_ids)  # other prompts must not build on what may be wrong
            if has_shrunk or self._recovery.is_retried(request, is_shared):
                self._preempt(request)
                outcome.retried.append(request)
            else:
                request.error = message
                self._end(request, FinishReason.ERROR)
                outcome.finished.append(request)
        if has_shrunk:
            self._bound_steps()
            self._retire_blocks()

    def _bound_steps(self) -> None:
        self.policy.max_step_tokens = min(self.policy.max_step_tokens, self._recovery.most_step_tokens)

    def _retire_blocks(self) -> None:
        """As far as every unfinished request still fits."""
        needed = max((self._num_blocks(one.max_known_tokens) for one in self.requests.values()), default=0)
        spare = self.pool.num_blocks - max(needed, self.config.num_blocks // 2)
        self.pool.retire(max(0, min(int(_RETIRED_SHARE * self.config.num_blocks), spare)))

    def _advance(self, sequences: Sequence[Request], epochs: Sequence[int], outcome: Committed) -> None:
        """Flat, because every token passes this loop: with 1,000 streams each call in it counts."""
        block_size, plan = self.block_size, outcome.plan
        emit = outcome.emissions.append
        lengths = chain(repeat(1, len(plan.decodes)), [chunk.length for chunk in plan.chunks])
        rows = zip(count(), sequences, epochs, lengths, outcome.result.tokens, strict=False)
        for index, request, epoch, length, tokens in rows:
            if request.epoch != epoch:
                continue
            request.num_committed = after = request.num_committed + length
            if after % block_size < length:  # the last token of a block was among these
                self.prefix_cache.publish(request, after - length)
            emit((request, index, tokens))
            if tokens:
                request.num_pending -= 1
                known = request.tokens
                known += tokens
                if len(known) >= request.max_known_tokens or tokens[-1] in request.stop_token_ids:
                    self._end_if_due(request, outcome)

    def _end_if_due(self, request: Request, outcome: Committed) -> None:
        stops = request.tokens[-1] in request.stop_token_ids
        if stops and request.num_output_tokens >= request.sampling.min_tokens:
            reason = FinishReason.STOP
        elif len(request.tokens) >= request.max_known_tokens:
            reason = FinishReason.LENGTH
        else:
            return
        self._end(request, reason)
        outcome.finished.append(request)

    # ---- leaving a slot ----

    def _preempt(self, request: Request) -> None:
        """Take a running request's slot and blocks. It starts over when there is room, keeping its output so far."""
        self._leave(request)
        request.status = Status.PREEMPTED
        request.place.num_tokens, request.place.num_cached_tokens = request.num_known, 0
        request.num_scheduled = request.num_committed = request.num_pending = request.num_cached_tokens = 0
        self.order.push(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._leave(request)
        else:
            self.order.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._recovery.discard(request.id)
        self.order.discard(request)
        del self.requests[request.id]
        self._expiring.pop(request.id, None)

    def _leave(self, request: Request) -> None:
        self.prefix_cache.abandon(request)
        request.epoch += 1
        last_step_id = self._in_flight[-1].plan.step_id if self._in_flight else None
        self.pool.release(request.block_ids, last_step_id, self._block_cost(request))
        request.block_ids = []
        self._free_slots.append(request.slot)
        self._released_slots.append(request.slot)
        if self._table_changes:
            self._table_changes = [change for change in self._table_changes if change.slot != request.slot]
        request.slot = -1
        self._prefilling.pop(request.id, None)
        self._decoding.pop(request.id, None)
        self._decode_columns = None

    def _block_cost(self, request: Request) -> float:
        """Seconds that each of its blocks saves who needs them again. Long prefixes save more: attention grows."""
        num_tokens = request.num_committed
        if not self.config.enable_prefix_caching or num_tokens < self.block_size:
            return 0.0
        return self._prefill_price(0, num_tokens) * self.block_size / num_tokens
