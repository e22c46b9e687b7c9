"""evenflow's scheduler in virtual time, on the step times of a roofline: what each request of a load would see.

The same scheduler can serve a load by three rules: `shares` (its own), `fcfs` (one class, one tenant) and `priority`
(vLLM's: classes in the waiting queue, running requests first, the last in of the least urgent is preempted first).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

from evenflow.core.account import Account
from evenflow.core.holdings import Holdings
from evenflow.core.outcome import Committed
from evenflow.core.plan import ExecutorCaps, StepPlan
from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.roofline import ModelWork, known_device, roofline
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.service_classes import DEFAULT_CLASSES, Classes
from evenflow.core.service_order import ServiceOrder, Start
from evenflow.core.step_costs import StepCosts, figures_of
from evenflow.core.step_time import StepTimeModel
from evenflow.simulation.devices import ModelDevice
from evenflow.simulation.loop import Loop, Timed
from evenflow.simulation.own_engine import OwnEngine
from evenflow.simulation.replica import Replica

RULES = ("shares", "fcfs", "priority")
BLOCK_SIZE = 16
TRACE_BLOCK = 512  # tokens of one of a trace's block ids
_OVERHEAD_S = 0.001  # of the host, per step
_JITTER = 0.05  # step times vary by this much, evenly
_MODEL = ModelWork(  # an 8B model in 16 bits
    num_layers=32, row_flops=15e9, weight_bytes=15e9, position_flops=4.0 * 32 * 4096, cache_bytes=131_072
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a load."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int
    tenant: str = ""
    service_class: str = "standard"
    block_ids: tuple[int, ...] = ()  # equal leading ids: equal prefixes


@dataclass(slots=True)
class Served:
    """What a request saw."""

    arrival: Arrival
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    cached_tokens: int = 0  # that it found when it started
    num_prefilled: int = 0  # of its prompt, when the run ended

    def took(self, now: float) -> None:
        """It got a token."""
        self.num_tokens += 1
        self.last_token = now
        if self.first_token is None:
            self.first_token = now

    def ttft(self, end: float) -> float:
        """A request without a token has waited until the end."""
        return (end if self.first_token is None else self.first_token) - self.arrival.at

    def mean_gap(self) -> float:
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return 0.0
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    @property
    def done(self) -> Arrival:
        """The part of it that was served."""
        prompt = self.arrival.num_prompt_tokens if self.num_tokens else self.num_prefilled
        return replace(self.arrival, num_prompt_tokens=prompt, num_output_tokens=self.num_tokens)

    @property
    def is_complete(self) -> bool:
        return self.num_tokens >= self.arrival.num_output_tokens


@dataclass(slots=True)
class Outcome:
    """A whole run."""

    served: list[Served]
    seconds: float
    num_steps: int = 0
    num_tokens: int = 0  # computed or given out, each once: recomputed ones do not count
    useful_s: float = 0.0  # device seconds of the same, without what was cached
    work: list[tuple[float, str, float]] = field(default_factory=list)  # when, tenant, device seconds

    def count(self) -> None:
        device = Device()
        done = [one.done for one in self.served]
        self.num_tokens = sum(one.num_prompt_tokens + one.num_output_tokens for one in done)
        cached = [min(one.cached_tokens, part.num_prompt_tokens) for one, part in zip(self.served, done, strict=True)]
        self.useful_s = sum(map(device.seconds_alone, done, cached))


class Device:
    """A GPU by its roofline."""

    def __init__(self, name: str = "NVIDIA H200") -> None:
        known = known_device(name)
        assert known is not None
        self.costs: StepCosts = roofline(_MODEL, known)

    def work(self, plan: StepPlan, tenant_of: Mapping[str, str], seconds: float) -> Iterator[tuple[str, float]]:
        """A step's seconds by tenant: attention is for who attends, the rest by rows."""
        costs = self.costs
        parts = [
            (tenant_of[request_id], 1, costs.context * (position + 1))
            for request_id, position in zip(plan.decodes.request_ids, plan.decodes.positions, strict=True)
        ]
        parts += [
            (tenant_of[one.request_id], one.length, costs.attention * one.length * (one.start + one.length / 2))
            for one in plan.chunks
        ]
        of_row = (seconds - sum(attention for _, _, attention in parts)) / plan.num_rows
        return ((tenant, attention + rows * of_row) for tenant, rows, attention in parts)

    def seconds_alone(self, arrival: Arrival, num_cached_tokens: int = 0) -> float:
        """A request's device seconds in large batches."""
        prompt, output, costs = arrival.num_prompt_tokens, arrival.num_output_tokens, self.costs
        computed = costs.row * (prompt - num_cached_tokens) + costs.attention * (prompt**2 - num_cached_tokens**2) / 2
        return computed + output * (costs.row + costs.context * (prompt + output / 2) + costs.step / 256)


class PriorityOrder(ServiceOrder):
    """vLLM's priority rule: the waiting queue is ordered by class and arrival, and that is all a class does, except
    that the last in of the least urgent class is preempted first when a running request finds no block."""

    is_shared = True

    def waiting_but(self, at_limit: Set[str] = frozenset()) -> Iterator[Request]:
        waiting = [request for line in self._lines.values() for request in line.waiting]
        return iter(sorted(waiting, key=lambda one: (one.account.level, one.rank)))

    def arrange(self, starts: list[Start], room: int) -> list[Start]:
        running = [start for start in starts if start[0].is_running]  # in order of admission
        waiting = [start for start in starts if not start[0].is_running]
        return (running + sorted(waiting, key=lambda one: (one[0].account.level, one[0].rank)))[:room]

    def charge(self, prices: Mapping[Account, float]) -> None:
        """Nobody has a share."""

    def first_to_yield(self, running: Sequence[Request], holdings: object) -> Request:
        return max(running, key=lambda one: (one.account.level, one.rank))

    def yielding(self, request: Request, running: Sequence[Request], held: Holdings) -> Iterator[Request]:
        return iter(())

    def may_pass(self, request: Request, blocked: Request, held: Holdings) -> bool:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """An engine for a load."""

    rule: str = "shares"
    policy: str = "fixed:2048"
    num_blocks: int = 50_000
    max_num_seqs: int = 256
    classes: Classes = DEFAULT_CLASSES
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0  # of the jitter

    def scheduler(self, costs: StepCosts) -> Scheduler:
        config = SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            policy=PolicySpec.parse(self.policy),
            max_num_seqs=self.max_num_seqs,
            classes=self.classes,
            tenant_weights=self.tenant_weights,
        )
        order = PriorityOrder(self.classes, {}, lambda start, length: float(length))
        return Scheduler(
            config,
            ExecutorCaps(),
            step_time=StepTimeModel(costs),
            order=order if self.rule == "priority" else None,
        )


def simulate(arrivals: Iterable[Arrival], setup: Setup, until: float, *, keeps_work: bool = False) -> Outcome:
    """Serve a load until this time."""
    gpu, rng = Device(), random.Random(setup.seed)
    scheduler = setup.scheduler(gpu.costs)
    coming = sorted(arrivals, key=lambda one: one.at)
    served = [Served(arrival) for arrival in coming]
    tenant_of = {str(number): arrival.tenant for number, arrival in enumerate(coming)}
    outcome = Outcome(served, 0.0)

    def commit(committed: Committed, now: float) -> Iterable[Timed]:
        plan, seconds = committed.plan, committed.result.seconds
        outcome.num_steps += 1
        if keeps_work:
            outcome.work += [(now, tenant, work) for tenant, work in by_tenant(gpu.work(plan, tenant_of, seconds))]
        for admission in plan.admissions:
            one = served[int(admission.request_id)]
            one.num_preemptions += admission.epoch > 0
            if admission.epoch == 0:
                one.cached_tokens = admission.num_cached_tokens
        for request, _, tokens in committed.emissions:
            if tokens:
                served[int(request.id)].took(now)
        return ()

    device = ModelDevice(
        lambda work: gpu.costs.seconds(figures_of(work.shape(scheduler.caps))),
        lambda seconds, at: seconds * rng.uniform(1 - _JITTER, 1 + _JITTER),
    )
    replica = Replica(OwnEngine(scheduler), device, commit, output_s=_OVERHEAD_S)

    def arrive(number: int, now: float) -> Iterable[Timed]:
        return replica.receive(lambda _: scheduler.add(_request(number, coming[number], setup.rule)), now)

    Loop(((one.at, partial(arrive, number)) for number, one in enumerate(coming)), until).run()
    outcome.seconds = replica.now
    for request in scheduler.requests.values():
        served[int(request.id)].num_prefilled = request.num_committed
    outcome.served = [one for one in served if one.arrival.at <= outcome.seconds]
    outcome.count()
    return outcome


def by_tenant(parts: Iterable[tuple[str, float]]) -> Iterable[tuple[str, float]]:
    total: dict[str, float] = {}
    for tenant, seconds in parts:
        total[tenant] = total.get(tenant, 0.0) + seconds
    return total.items()


def _request(number: int, arrival: Arrival, rule: str) -> Request:
    return Request(
        str(number),
        [0] * arrival.num_prompt_tokens,
        SamplingParams(max_tokens=max(1, arrival.num_output_tokens), ignore_eos=True),
        seed=0,
        max_model_len=1 << 20,
        block_hashes=_block_hashes(number, arrival),
        salt=arrival.tenant.encode(),
        arrival_time=arrival.at,
        tenant="" if rule == "fcfs" else arrival.tenant,
        service_class="" if rule == "fcfs" else arrival.service_class,
    )


def _block_hashes(number: int, arrival: Arrival) -> list[bytes]:
    num_blocks = arrival.num_prompt_tokens // BLOCK_SIZE
    per_id = TRACE_BLOCK // BLOCK_SIZE
    ids: list[object] = [*arrival.block_ids, *[f"own{number}"] * (num_blocks // per_id + 1 - len(arrival.block_ids))]
    return [f"{arrival.tenant}/{ids[block // per_id]}/{block}".encode() for block in range(num_blocks)]


def quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
