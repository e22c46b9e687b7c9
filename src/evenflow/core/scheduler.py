"""Turns requests into steps: `schedule` plans one and advances the counters, `commit` takes in its result.

Between the two calls a step is in flight, and the next may already be planned; see `ExecutorCaps.max_steps_in_flight`.
Nothing here waits, reads a clock or draws a random number: the same calls give the same plans.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, repeat

from evenflow.core.block_moves import BlockMover
from evenflow.core.blocks import BlockPool
from evenflow.core.outcome import Committed, InFlight, Repeat
from evenflow.core.plan import ExecutorCaps, StepPlan, StepResult
from evenflow.core.planner import Planner
from evenflow.core.policies import DEFAULT_POLICY, PolicySpec
from evenflow.core.policy import Candidate, Policy, Quotas
from evenflow.core.prefill_pace import PrefillPace
from evenflow.core.prefix_cache import PrefixCache
from evenflow.core.prices import Prices
from evenflow.core.recovery import Recovery
from evenflow.core.request import FinishReason, Request, Status
from evenflow.core.room import Room
from evenflow.core.seats import Seats
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes, ServiceClass, check_weights
from evenflow.core.service_order import ServiceOrder
from evenflow.core.step_time import NUM_REMEMBERED, StepTimeModel
from evenflow.core.tier import Tier, TierConfig
from evenflow.errors import DeadlineExceeded, InvalidRequest, LateRequest

# When memory runs out, this share of the KV blocks goes out of service, down to half of them in all.
_RETIRED_SHARE = 1 / 8
# Steps without prefill, all planned while a prompt fitted, after which something is wrong: policies wait for 8 at most.
_MAX_STEPS_WITHOUT_PREFILL = 64
# Of prompts that would be late by themselves, one in this time is let through: no other one could correct the estimate.
_SECONDS_BETWEEN_TRIALS = 30.0


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


class Scheduler:
    """Owns the requests, blocks and slots of one engine."""

    def __init__(
        self,
        config: SchedulerConfig,
        caps: ExecutorCaps | None = None,
        *,
        step_time: StepTimeModel | None = None,
        order: ServiceOrder | None = None,
    ) -> None:
        self.config = config
        self.caps = caps or ExecutorCaps()
        self.block_size = config.block_size
        caches = config.enable_prefix_caching
        self._tenant_weights = weights = check_weights(config.tenant_weights)  # all parts read this one
        self.tier = tier = Tier(config.tier, weights) if config.tier is not None and caches else None
        listeners = (tier.take, tier.offer) if tier is not None else ()
        self.pool = BlockPool(config.num_blocks, weights, *listeners)
        self.prefix_cache = PrefixCache(
            self.pool, config.block_size, enabled=caches, tier=self.tier, has_answers=self.caps.reuses_answers
        )
        self.prices = prices = Prices(step_time or StepTimeModel(), self.caps)
        self._mover = BlockMover(self.pool, self.prefix_cache, tier, config.block_size, prices.prefill)
        self.order = order if order is not None else ServiceOrder(config.classes, weights, prices.prefill)
        self.planner: Planner[Request] = Planner(self.order, prices, config.policy, max_num_seqs=config.max_num_seqs)
        self._pace = PrefillPace(prices.prefill)
        self._refuses_late = any(one.refuse_late for one in config.classes)
        self._is_paced = self._refuses_late  # else from the first deadline on
        self._tried_at: float | None = None  # when a prompt that would be late by itself was last let through
        self._expiring: dict[str, Request] = {}  # those of them that have a deadline
        self._next_expiry = math.inf  # no deadline passes before
        self.seats = Seats(self.pool, self.prefix_cache, config.block_size, config.max_num_seqs, prices.prefill)
        self.room = Room(
            self.seats,
            self.order,
            self.pool,
            self.prefix_cache,
            self._mover,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            caps=self.caps,
            stream_price=prices.streams,
        )
        self._overheads: deque[float] = deque(maxlen=NUM_REMEMBERED)  # recent seconds of steps, less the run itself
        self._committed_at = -math.inf
        self._in_flight: deque[InFlight] = deque()
        self._next_step_id = 0
        self._recovery = Recovery()
        self._steps_without_prefill = 0  # in a row, each planned while the next prompt fitted

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
        needs_cached = self.policy.patience or self._refuses_late or request.sampling.deadline is not None
        num_cached = self.prefix_cache.count_published(request) if needs_cached else 0
        sampling = request.sampling
        service_class = self.planner.place(request, num_cached, sampling.tbt_seconds, sampling.ttft_seconds)
        self._refuse_if_late(request, service_class)
        if self._tried_at is None:
            self._tried_at = request.arrival_time
        self.planner.arrived(request)
        self.pool.saw(request.tenant, request.arrival_time)
        if self.tier is not None:
            self.tier.saw(request.tenant, request.arrival_time)
        self.order.push(request)
        if request.sampling.deadline is not None:
            self._is_paced = True
            self._expiring[request.id] = request
            self._next_expiry = min(self._next_expiry, request.expires_at)

    def _refuse_if_late(self, request: Request, service_class: ServiceClass) -> None:
        """Refuse what would end without an answer, and what its class does not take: the earlier, the better.

        Only prompts that run correct the estimate: what could start now is taken, and so is one that would be late by
        itself now and then.
        """
        deadline = request.sampling.deadline_seconds
        target = request.place.ttft_target if service_class.refuse_late else None
        limit = min(math.inf if deadline is None else deadline, math.inf if target is None else target)
        if limit == math.inf or not self.requests or not self.step_time.largest_rows_known:
            return
        streams = self._seconds_of_streams()
        expected = self._pace.seconds(self.order.seconds_before(request), streams)
        if expected <= limit:
            return
        retry_after = expected - limit
        start = request.place.num_cached_tokens
        if self._pace.seconds(self.prices.prefill(start, request.num_known - start), streams) > limit:
            since_trial = request.arrival_time - (self._tried_at or 0.0)
            if since_trial >= _SECONDS_BETWEEN_TRIALS:
                self._tried_at = request.arrival_time
                return
            retry_after = _SECONDS_BETWEEN_TRIALS - since_trial
        raise LateRequest(expected, limit, is_deadline=limit == deadline, retry_after_s=retry_after)

    def _seconds_of_streams(self) -> float:
        """What the streams that decode add to a step full of prefill."""
        streams = self.seats.decoding.values()
        return self.prices.streams(len(streams), sum([one.num_scheduled for one in streams]))

    def expire(self, now: float) -> dict[str, DeadlineExceeded]:
        """End requests whose deadlines have passed, waiting or running: nobody wants their answers any more."""
        if now < self._next_expiry:
            return {}
        found: dict[str, DeadlineExceeded] = {}
        for request in [one for one in self._expiring.values() if one.expires_at <= now]:
            deadline_s = request.sampling.deadline_seconds or 0.0
            error = found[request.id] = DeadlineExceeded(deadline_s, request.num_output_tokens)
            request.error = str(error)
            self._end(request, FinishReason.ERROR)
        self._next_expiry = min((one.expires_at for one in self._expiring.values()), default=math.inf)
        return found

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
        self.planner.set_policy(policy)
        self._bound_steps()
        self.config = replace(self.config, policy=policy)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share by these weights from the next step on. What tenants got and owe so far stays."""
        checked = check_weights(weights)
        self._tenant_weights.clear()
        self._tenant_weights.update(checked)
        self.config = replace(self.config, tenant_weights=checked)

    @property
    def policy(self) -> Policy:
        return self.planner.policy

    @property
    def step_time(self) -> StepTimeModel:
        return self.planner.step_time

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished ones."""
        return self.planner.requests

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or bool(self._in_flight) or self._mover.needs_step

    @property
    def waiting(self) -> ServiceOrder:
        """Requests that wait for a slot, in order of service."""
        return self.order

    @property
    def num_running(self) -> int:
        return len(self.seats)

    @property
    def num_recomputed_blocks(self) -> int:
        """Blocks that were computed so far although the tier had them: that was quicker, or they came too late."""
        return self._mover.num_recomputed

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def plans_in_flight(self) -> list[StepPlan]:
        """The oldest first."""
        return [step.plan for step in self._in_flight]

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
        if self.seats.prefilling or self.order:
            self.planner.line_up(now)
        self.room.start_step(self.policy)
        decodes = self.room.secure_decodes()
        candidates = self.room.candidates()
        if self._recovery.suspects:
            decodes, candidates = self._recovery.turn(decodes, candidates)
        positions = [request.num_scheduled for request in decodes]
        quotas = self._quotas(now, decodes, candidates, sum(positions) + len(decodes))
        if not quotas.run_decodes:
            decodes, positions = [], []
        if not decodes and not quotas.chunks and (self._in_flight or not self._mover.needs_step):
            return None
        step_id = self._next_step_id
        self._next_step_id += 1
        released = self.seats.take_released_slots()
        left_out = len(self.seats.decoding) - len(decodes)
        columns = self.seats.take_decodes(decodes, positions)
        prefills = [self.requests[candidates[quota.candidate].request_id] for quota in quotas.chunks]
        admissions = [self.room.admit(request) for request in prefills if request.status is not Status.RUNNING]
        chunks = list(map(self.seats.take_chunk, prefills, quotas.chunks))
        plan = StepPlan(
            step_id=step_id,
            released_slots=released,
            admissions=tuple(admissions),
            block_changes=self.seats.take_table_changes(
                {*columns.slots, *(one.slot for one in chunks)} if left_out else None
            ),
            decodes=columns,
            chunks=tuple(chunks),
            padded_rows=self.caps.padded_rows(len(columns) + sum(quota.tokens for quota in quotas.chunks)),
            moves=self._mover.take_moves(),
            most_seconds=quotas.most_seconds if chunks else None,
        )
        shape = plan.shape(self.caps)
        predicted = self.step_time.predict(shape)
        step = InFlight(plan, shape, predicted, now, decodes + prefills)
        if plan.most_seconds is None:
            self._charge(step, plan, predicted)
        has_reason = chunks or not self.order or self._mover.is_restoring or not self.room.fits_next()
        self._steps_without_prefill = 0 if has_reason else self._steps_without_prefill + 1
        self.seats.newest_step = step_id
        self._in_flight.append(step)
        return plan

    def _quotas(
        self, now: float, decodes: Sequence[Request], candidates: Sequence[Candidate], decode_context: int
    ) -> Quotas:
        return self.planner.plan(
            now,
            decodes,
            candidates,
            num_decodes=len(decodes),
            decode_context=decode_context,
            num_in_flight=len(self._in_flight),
            overhead=self.overhead,
            free_tokens=self.pool.num_free * self.block_size,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
        )

    def admission_failure(self) -> str | None:
        """What is wrong if nothing is admitted although it could be; None if all is well."""
        if self._steps_without_prefill < _MAX_STEPS_WITHOUT_PREFILL:
            return None
        return (
            f"no prompt was computed in {self._steps_without_prefill} steps although the next one fits: "
            f"{self.seats.num_free} slots and {self.pool.num_free} KV blocks are free, {len(self.order)} wait"
        )

    def _charge(self, step: InFlight, plan: StepPlan, seconds: float) -> None:
        """For what `plan` says that the step computes: at once, or when it has ended if it may shed rows."""
        requests, positions = step.sequences, plan.decodes.positions
        prefills = zip(requests[len(positions) :], plan.chunks, strict=True)
        self.planner.charge(
            ((request.account, position + 1) for request, position in zip(requests, positions, strict=False)),
            [(request, chunk.start, chunk.length) for request, chunk in prefills],
            plan.num_rows,
            seconds,
        )

    # ---- taking in a step's result ----

    def commit(self, result: StepResult, now: float) -> Committed:
        """Take in the result of the oldest step in flight, except for requests that have left their slot since."""
        step = self._in_flight.popleft()
        plan = step.plan
        if not self._in_flight:
            self.seats.newest_step = None
        if result.step_id != plan.step_id or len(result.tokens) != plan.num_sequences:
            raise RuntimeError(f"step {plan.step_id} is the oldest in flight, not step {result.step_id} of this result")
        outcome = self._outcome_of(step, result)
        epochs = [*plan.decodes.epochs, *(chunk.epoch for chunk in plan.chunks)]
        for index, message in result.errors.items():
            request = step.sequences[index]
            if request.epoch == epochs[index]:
                request.error = message
                self._end(request, FinishReason.ERROR)  # starts an epoch: `_advance` drops the row
                outcome.finished.append(request)
        if result.faults:
            self._take_faults(step.sequences, epochs, outcome)
        for index, shed in result.shed.items():
            if (request := step.sequences[index]).epoch == epochs[index]:
                self.seats.take_back(request, plan.chunks[index - len(plan.decodes)], shed.length)
        if plan.most_seconds is not None:
            self._charge(step, outcome.computed, outcome.predicted_seconds)
        self._advance(step.sequences, epochs, outcome)
        if self._recovery.suspects:
            for request, _, tokens in outcome.emissions:
                if tokens:
                    self._recovery.gave_token(request.id)
        self.pool.settle(plan.step_id)
        self._mover.commit(result.tier)
        outcome.late.extend(self.planner.emitted([one for one, _, tokens in outcome.emissions if tokens], now))
        if not result.errors and not result.faults and plan.num_sequences:
            self.planner.observe((outcome.shape,), result.seconds)
            if self._is_paced and plan.chunks and outcome.predicted_seconds:
                shape = outcome.shape
                streams = self.prices.streams(shape.decode_sequences, shape.decode_context)
                self._pace.observe(plan.step_id, outcome.computed.chunks, result.seconds + self.overhead, streams)
        if plan.num_sequences:
            # A step that was planned behind another one also waited for that.
            began = max(step.planned_at, self._committed_at)
            self._overheads.append(max(0.0, now - began - result.seconds))
        self._committed_at = now
        return outcome

    def _outcome_of(self, step: InFlight, result: StepResult) -> Committed:
        """What the step computed: less than planned if it shed rows."""
        plan, shed = step.plan, result.shed
        if not shed:
            return Committed(plan, plan, plan, result, [], [], step.shape, step.predicted_seconds)
        computed = plan.with_lengths({number: one.length for number, one in shed.items()})
        averaged = plan.with_lengths({number: one.mean_length for number, one in shed.items()})
        shape = averaged.shape(self.caps)._replace(logit_rows=computed.shape(self.caps).logit_rows)
        return Committed(plan, computed, averaged, result, [], [], shape, self.step_time.predict(shape))

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
                self.room.preempt(request)
                outcome.retried.append(request)
            else:
                request.error = message
                self._end(request, FinishReason.ERROR)
                outcome.finished.append(request)
        if has_shrunk:
            self._bound_steps()
            self._retire_blocks()

    def _bound_steps(self) -> None:
        self.policy.max_step_tokens = min(self.policy.max_step_tokens, self._recovery.max_step_tokens)

    def _retire_blocks(self) -> None:
        """As far as every unfinished request still fits."""
        needed = max((self.seats.num_blocks(one.max_known_tokens) for one in self.requests.values()), default=0)
        spare = self.pool.num_blocks - max(needed, self.config.num_blocks // 2)
        self.pool.retire(max(0, min(int(_RETIRED_SHARE * self.config.num_blocks), spare)))

    def _advance(self, sequences: Sequence[Request], epochs: Sequence[int], outcome: Committed) -> None:
        """Flat, because every token passes this loop: with 1,000 streams each call in it counts."""
        block_size, plan, tokens_of = self.block_size, outcome.computed, outcome.result.tokens
        publish, gone = self.prefix_cache.publish, set[int]()
        lengths = chain(repeat(1, len(plan.decodes)), [chunk.length for chunk in plan.chunks])
        for request, epoch, length, tokens in zip(sequences, epochs, lengths, tokens_of, strict=False):
            if request.epoch != epoch:
                gone.add(id(request))
                continue
            request.num_committed = after = request.num_committed + length
            if after % block_size < length:  # the last token of a block was among these
                publish(request, after - length)
            if tokens:
                known = request.tokens
                known += tokens
                if len(known) >= request.max_known_tokens or tokens[-1] in request.stop_token_ids:
                    self._end_whole(request, outcome)
        rows = zip(sequences, count(), tokens_of, strict=False)
        outcome.emissions.extend(rows if not gone else (row for row in rows if id(row[0]) not in gone))

    def _end_whole(self, request: Request, outcome: Committed) -> None:
        """At a stop token, or at its full length. Before `min_tokens` a stop token comes only if nothing else may."""
        stops = request.tokens[-1] in request.stop_token_ids
        self._end(request, FinishReason.STOP if stops else FinishReason.LENGTH)
        outcome.finished.append(request)

    # ---- many steps at once ----

    def num_repeats(self) -> int:
        """How many steps from here on give each stream one token and change nothing else, whatever they take.

        For simulations, which then need not plan them one by one. Every stream ends by its length alone.
        """
        streams, pacing = self.seats.decoding, self.planner.pacing
        if not streams or self.seats.prefilling or self.order or self.order.is_shared or self._expiring:
            return 0
        if self.tier is not None or self._recovery.suspects or (pacing is not None and pacing.is_paced):
            return 0
        if len(self._in_flight) + 1 != self.caps.max_steps_in_flight:
            return 0
        if any(len(step.sequences) != len(streams) or step.plan.chunks for step in self._in_flight):
            return 0
        left = min([one.max_known_tokens - one.num_scheduled for one in streams.values()]) - 1
        if not self._in_flight:  # else the last token is still in flight when the last of these steps is committed
            left -= 1
        blocks = self.pool.num_free // len(streams) - 1  # a stream may need one for its first token
        most = max(0, min(left, blocks * self.block_size))
        return min(most, 1) if self.pool.num_settling else most  # blocks that come free may change what is evicted

    def repeat(self, repeats: Sequence[Repeat], token: int) -> None:
        """Plan and commit steps that give each stream this token: at most `num_repeats` of them."""
        streams, count = list(self.seats.decoding.values()), len(repeats)
        oldest = sum([one.num_committed for one in streams]) + len(streams)  # context of the next step to commit
        for request in streams:
            before = request.num_committed
            request.num_scheduled += count
            request.num_committed += count
            request.tokens += [token] * count
            if missing := max(0, self.seats.num_blocks(request.num_scheduled) - len(request.block_ids)):
                self.seats.append_blocks(request, missing)
            if request.num_committed // self.block_size > before // self.block_size:
                self.prefix_cache.publish(request, before)
        planned = [*(step.planned_at for step in self._in_flight), *(one.planned_at for one in repeats)]
        for number in range(self._first_that_matters(oldest, len(streams), count), count):
            one = repeats[number]
            shape = self.caps.step_shape(num_decodes=len(streams), decode_context=oldest + number * len(streams))
            if self.policy.heeds_decodes:
                ahead = oldest + (number + len(self._in_flight)) * len(streams)
                self._quotas(one.planned_at, streams, [], ahead)
            self.planner.observe((shape,), one.seconds)
            began = max(planned[number], repeats[number - 1].committed_at if number else self._committed_at)
            self._overheads.append(max(0.0, one.committed_at - began - one.seconds))
        self._committed_at = repeats[-1].committed_at
        self.pool.settle(self._next_step_id + count - 1 - len(self._in_flight))
        self.planner.emitted(streams, self._committed_at)
        self.planner.charge([], [], len(streams), sum([one.seconds for one in repeats]))
        self._steps_without_prefill = 0
        self._next_step_id += count
        self._in_flight = deque(map(self._repeated, self._in_flight, planned[count:], repeat(count)))
        self.seats.newest_step = self._in_flight[-1].plan.step_id if self._in_flight else None

    def _first_that_matters(self, context: int, num_streams: int, count: int) -> int:
        """Of this many steps without prefill, the first that the policy and the step times learn from."""
        if self.policy.heeds_decodes:
            return 0
        contexts = context, context + (count - 1) * num_streams
        first, last = (self.caps.step_shape(num_decodes=num_streams, decode_context=one) for one in contexts)
        return 0 if self.step_time.learns_between(first, last) else max(0, count - NUM_REMEMBERED)

    def _repeated(self, step: InFlight, planned_at: float, count: int) -> InFlight:
        """The step in flight in this one's place, that number of steps later."""
        columns = step.plan.decodes
        plan = StepPlan(
            step_id=step.plan.step_id + count,
            released_slots=(),
            admissions=(),
            block_changes=(),
            decodes=replace(columns, positions=tuple([position + count for position in columns.positions])),
            chunks=(),
            padded_rows=step.plan.padded_rows,
        )
        shape = plan.shape(self.caps)
        return replace(
            step, plan=plan, shape=shape, predicted_seconds=self.step_time.predict(shape), planned_at=planned_at
        )

    # ---- leaving a slot ----

    def _end(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self.seats.leave(request)
        else:
            self.order.remove(request)
        request.status = Status.FINISHED
        request.finish_reason = reason
        self._recovery.discard(request.id)
        self.planner.left(request)
        self._expiring.pop(request.id, None)
