"""Metrics derived from step reports and from starts and ends of requests.

The server notifies `Observer`, always on one thread; the live page and traces listen to it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from fastapi import APIRouter, Request, Response
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from evenflow.best_effort import BestEffort
from evenflow.core.deadlines import LateToken
from evenflow.core.report import ChunkReport, Stall, StepReport
from evenflow.server.access import Caller
from evenflow.server.metrics.by_class import ClassFigures
from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.instruments import (
    TIER_EVENTS,
    ClassMetrics,
    EvenflowMetrics,
    MetricFactory,
    VllmMetrics,
    token_histograms,
)

logger = logging.getLogger("evenflow.server")

WINDOW_S = 60  # of the recent quantiles
MAX_LATE = 8  # gaps kept per request
MAX_CHUNKS = 4096  # kept per open request: repeated preemptions may add any number


@dataclass(frozen=True, slots=True)
class EngineState:
    """The state of the engine's process, independent of its steps."""

    is_up: bool
    num_restarts: int = 0
    max_model_len: int = 0  # 0: unknown
    num_blocks: int = 0
    block_size: int = 0
    policy: str = ""  # of the next step; reports have their own
    target_s: float | None = None


@dataclass(slots=True)
class ServedRequest:
    """One request in the server, from acceptance to end. Times by the clock; None: not yet."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    started_at: float
    key: str = ""  # the name of the sender's API key; "" without keys
    endpoint: str = ""  # the request's path; "" for requests of a host engine
    model: str = ""  # its name in the response; likewise
    service_class: str = ""  # likewise
    admitted_at: float | None = None  # the start of its first step
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached_tokens: int = 0  # at its first admission
    num_preemptions: int = 0
    num_retries: int = 0  # after faults
    chunks: deque[tuple[float, ChunkReport]] = field(  # the latest, each with its commit time
        default_factory=lambda: deque(maxlen=MAX_CHUNKS)
    )
    late: list[Stall] = field(default_factory=list)  # its longest gaps before late tokens, longest first
    num_output_tokens: int = 0
    finish_reason: str = ""
    error: str | None = None
    finished_at: float = 0.0

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were not cached."""
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)

    def keep_late(self, token: LateToken, report: StepReport) -> None:
        """Keep this gap if it is one of the longest."""
        if len(self.late) < MAX_LATE or token.gap > self.late[-1].gap_s:
            self.late.append(report.explain(token))
            self.late.sort(key=lambda one: -one.gap_s)
            del self.late[MAX_LATE:]


class Listener:
    """The interface of an Observer's listeners. Does nothing by itself."""

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""

    def on_request_started(self, record: ServedRequest) -> None:
        """A request was accepted."""

    def on_first_token(self, record: ServedRequest) -> None:
        """A request got its first token; called again after a retry."""

    def on_request_retried(self, record: ServedRequest) -> None:
        """A request is recomputed after a fault."""

    def on_request_finished(self, record: ServedRequest) -> None:
        """A request ended, for any reason."""


class Observer:
    """Turns the engine's state, steps and requests into metrics."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.loaded_model = model_name  # the name of that which the engine serves now
        self.clock = clock  # the source of all times here
        self.collectors = CollectorRegistry()
        self.engine_state = EngineState(is_up=False)
        self.policy = ""  # of the next step
        self.target_s: float | None = None
        self.feasible_target_s: float | None = None
        self.last_report: StepReport | None = None  # None: nothing runs
        self.admission_failure: str | None = None  # the reason, if requests wait in spite of free capacity
        self.recent_tbt = RecentQuantiles(WINDOW_S)
        self.recent_ttft = RecentQuantiles(WINDOW_S)
        self.requests: dict[str, ServedRequest] = {}  # open ones
        self._factory = MetricFactory(self.collectors, model_name)
        self._vllm = VllmMetrics(self._factory)
        self._own = EvenflowMetrics(self._factory)
        self.classes = ClassFigures(ClassMetrics(self._factory), WINDOW_S)
        self._token_histograms: list[tuple[str, Histogram]] = []  # empty until the model's context is known
        self._last_token_at: dict[str, float] = {}  # outside the records, for fast access at every token
        self.tenants = self._factory.tenant_figures()
        self._listeners: list[Listener] = []
        self._best_effort = BestEffort(logger)
        self._connect_gauges()
        self.collectors.register(PROCESS_COLLECTOR)

    def listen(self, listener: Listener) -> None:
        """Notify this listener from now on."""
        self._listeners.append(listener)

    # ---- the engine ----

    def on_engine_state(self, state: EngineState) -> None:
        """The engine process came up (with known limits), went down or restarted; or its policy changed."""
        self._own.up.set(state.is_up)
        self._own.restarts.inc(state.num_restarts - self.engine_state.num_restarts)
        self.engine_state = state
        self.policy, self.target_s, self.feasible_target_s = state.policy, state.target_s, None
        if state.max_model_len and not self._token_histograms:
            self._token_histograms = token_histograms(self._factory, state.max_model_len)
            sizes = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.num_blocks)}
            self._factory.info("vllm:cache_config_info", "The KV cache's sizes.", sizes)
        if not state.is_up:
            self.last_report = self.admission_failure = None

    def on_model_loaded(self, name: str) -> None:
        """The engine serves this model from now on."""
        self._own.model_loaded(self.loaded_model).set(0)
        self._own.model_loaded(name).set(1)
        self._own.model_loads(name).inc()
        self.loaded_model = name

    def on_step(self, report: StepReport) -> None:
        """A step was committed. Call before `on_request_finished` for the requests it ended."""
        self.policy, self.target_s, self.feasible_target_s = report.policy, report.target_s, report.feasible_target_s
        if self.requests:  # else all were aborted during the step
            self.last_report = report
        for count in (
            *(self._record_faults, self._record_admissions, self._record_tokens, self._observe_step),
            *(self._count_late_tokens, self._count_moves),
        ):
            self._best_effort.run("metrics", partial(count, report), None)
        self._tell(Listener.on_step, report)

    # ---- requests ----

    def on_request_started(self, record: ServedRequest, num_choices: int | None = 1) -> None:
        """A request was sent to the engine.

        A call with several choices makes several requests: `num_choices` is their number in the first, else None.
        """
        self.requests[record.request_id] = record
        self._best_effort.run("metrics", partial(self._count_request, record, num_choices), None)
        self._tell(Listener.on_request_started, record)

    def on_request_finished(
        self, request_id: str, reason: str, num_tokens: int, now: float | None = None, error: str | None = None
    ) -> None:
        """A request ended by stop, length, abort or error. Call exactly once for every started request."""
        record = self.requests.pop(request_id)
        record.last_token_at = self._last_token_at.pop(request_id, None)
        record.finish_reason, record.num_output_tokens, record.error = reason, num_tokens, error
        record.finished_at = self.clock() if now is None else now
        self._best_effort.run("metrics", partial(self._observe_request, record), None)
        if not self.requests:  # there may be no further step
            self.last_report = None
        self._tell(Listener.on_request_finished, record)

    def on_request_retried(self, request_id: str) -> None:
        """The engine died before this request's first token reached the client: the next engine recomputes it."""
        record = self.requests[request_id]
        record.num_retries += 1
        record.first_token_at = None
        self._last_token_at.pop(request_id, None)
        self._own.retries("engine").inc()
        self._tell(Listener.on_request_retried, record)

    def on_request_rejected(self, reason: str) -> None:
        """A request was refused for lack of capacity. `reason`: one of REFUSALS."""
        self._own.rejected(reason).inc()

    def _count_request(self, record: ServedRequest, num_choices: int | None) -> None:
        self.classes.on_started(record.service_class)
        if num_choices is not None:
            self._vllm.params_n.observe(num_choices)

    def _tell(self, event: Callable[..., None], what: StepReport | ServedRequest) -> None:
        """Notify all listeners. A failing listener loses this event, but affects no request and no other listener."""
        for listener in self._listeners:
            call = partial(getattr(listener, event.__name__), what)
            self._best_effort.run(f"{type(listener).__name__}.{event.__name__}", call, None)

    # ---- steps ----

    def _record_faults(self, report: StepReport) -> None:
        self.admission_failure = report.admission_failure
        for request_id in report.retried:
            self._own.retries("step").inc()
            if (record := self.requests.get(request_id)) is not None:
                record.num_retries += 1
                self._tell(Listener.on_request_retried, record)

    def _count_moves(self, report: StepReport) -> None:
        if (tier := report.tier) is None:
            return
        own = self._own
        own.tier_stored.set(tier.num_stored)
        counts = tier.num_saved, tier.num_restored, tier.num_lost, tier.num_recomputed
        for event, count in zip(TIER_EVENTS, counts, strict=True):
            own.tier_blocks(event).inc(count)
        own.tier_bytes("out").inc(tier.saved_bytes)
        own.tier_bytes("in").inc(tier.restored_bytes)
        own.tier_seconds("out").inc(tier.save_seconds)
        own.tier_seconds("in").inc(tier.restore_seconds)

    def _record_admissions(self, report: StepReport) -> None:
        """Record the admissions and chunks of a step."""
        for admission in report.admissions:
            self._vllm.prefix_queries.inc(admission.num_tokens)
            self._vllm.prefix_hits.inc(admission.num_cached_tokens)
            self._vllm.preemptions.inc(admission.was_preempted)
            record = self.requests.get(admission.request_id)
            if record is None:
                continue
            record.num_preemptions += admission.was_preempted
            if record.admitted_at is None:
                record.admitted_at = max(report.started_at, record.started_at)
                self.classes.on_begun(record.service_class)
                record.num_cached_tokens = admission.num_cached_tokens
        for chunk in report.chunks:
            self._own.chunk_tokens.observe(chunk.length)
            self._own.chunks(chunk.reason).inc()
            self._own.shed_tokens.inc(chunk.num_shed)
            if (record := self.requests.get(chunk.request_id)) is not None:
                record.chunks.append((report.at, chunk))

    def _record_tokens(self, report: StepReport) -> None:
        """Measure the gap before each token, for all streams of a step at once: few of their gaps differ."""
        resumed = []
        for chunk in report.chunks:
            if chunk.gave_token and chunk.request_id in self._last_token_at:
                resumed.append(chunk.request_id)
            elif chunk.gave_token and (record := self.requests.get(chunk.request_id)) is not None:
                self._record_first_token(record, report.at)
        self._record_gaps([*report.decoded, *resumed], report.at)
        self._vllm.generation_tokens.inc(report.num_output_tokens)

    def _record_first_token(self, record: ServedRequest, now: float) -> None:
        record.first_token_at = self._last_token_at[record.request_id] = now
        self._tell(Listener.on_first_token, record)
        ttft = now - record.started_at
        self._vllm.ttft.observe(ttft)
        self.classes.on_first_token(record.service_class, ttft, now)
        self.recent_ttft.observe(ttft, 1, now)
        cached = min(record.num_cached_tokens, record.num_prompt_tokens)
        self._vllm.prompt_tokens.inc(record.num_prompt_tokens)
        self._vllm.prompt_tokens_cached.inc(cached)
        self._vllm.prompt_tokens_by_source("local_compute").inc(record.num_prompt_tokens - cached)
        self._vllm.prompt_tokens_by_source("local_cache_hit").inc(cached)

    def _record_gaps(self, request_ids: Iterable[str], now: float) -> None:
        last = self._last_token_at
        known = [request_id for request_id in request_ids if request_id in last]
        if (only := self.classes.only) is not None:  # the usual case, which avoids a lookup per request
            gaps = {(only, gap): count for gap, count in Counter([now - last[one] for one in known]).items()}
        else:
            gaps = Counter([(self.requests[one].service_class, now - last[one]) for one in known])
        for (service_class, gap), count in gaps.items():
            self._vllm.inter_token.observe(gap, count)
            self.recent_tbt.observe(gap, count, now)
            self.classes.on_gap(service_class, gap, count, now)
        last.update(dict.fromkeys(known, now))

    def _observe_step(self, report: StepReport) -> None:
        own, num_prefill_tokens = self._own, report.num_prefill_tokens
        num_tokens = report.num_decodes + num_prefill_tokens
        self._vllm.iteration_tokens.observe(num_tokens)
        own.budget_use.observe(num_tokens / report.budget)
        own.step_tokens("decode").inc(report.num_decodes)
        own.step_tokens("prefill").inc(num_prefill_tokens)
        own.part_seconds("decode").inc(report.decode_seconds)
        own.part_seconds("prefill").inc(max(0.0, report.seconds - report.decode_seconds))
        own.step_seconds.observe(report.seconds)
        if report.predicted_seconds and report.seconds:
            own.predicted_seconds.observe(report.predicted_seconds)
        if (error := report.prediction_error) is not None:
            own.prediction_error.observe(error)

    def _count_late_tokens(self, report: StepReport) -> None:
        self._own.late_tokens.inc(len(report.late))
        for token in report.late:
            if (record := self.requests.get(token.request_id)) is not None:
                record.keep_late(token, report)
        if (stall := report.stall) is not None:
            self._own.stalls.inc()
            for cause in stall.causes:
                self._own.stall_seconds(cause.kind).inc(cause.seconds)

    # ---- finished requests ----

    def _observe_request(self, record: ServedRequest) -> None:
        self._vllm.request_success(record.finish_reason).inc()
        self._vllm.request_preemptions.observe(record.num_preemptions)
        self._own.request_chunks.observe(len(record.chunks))
        queue_s = (record.finished_at if record.admitted_at is None else record.admitted_at) - record.started_at
        self.tenants.count(record.key, record.tenant, record.num_prompt_tokens, record.num_output_tokens, queue_s)
        self.classes.on_finished(
            record.service_class,
            has_begun=record.admitted_at is not None,
            num_prompt_tokens=record.num_prompt_tokens,
            num_output_tokens=record.num_output_tokens,
        )
        for field_name, histogram in self._token_histograms:
            histogram.observe(getattr(record, field_name))
        for start, end, histogram in self._vllm.phases:  # phases that the request completed
            if (started_at := getattr(record, start)) is not None and (ended_at := getattr(record, end)) is not None:
                histogram.observe(ended_at - started_at)
        if record.num_output_tokens > 1 and record.first_token_at is not None and record.last_token_at is not None:
            decode_s = record.last_token_at - record.first_token_at
            self._vllm.request_tpot.observe(decode_s / (record.num_output_tokens - 1))

    # ---- gauges ----

    def _connect_gauges(self) -> None:
        """Connect the gauges, which are computed on reading."""

        def last(figure: Callable[[StepReport], float]) -> Callable[[], float]:
            return lambda: 0 if self.last_report is None else figure(self.last_report)

        def quantile(recent: RecentQuantiles, share: float) -> Callable[[], float]:
            return lambda: _or_nan(recent.quantiles((share,), self.clock(), WINDOW_S)[0])

        self._vllm.running.set_function(last(lambda report: report.num_running))
        self._vllm.waiting.set_function(last(lambda report: report.num_waiting))
        self._vllm.kv_cache_usage.set_function(last(lambda report: report.kv_cache_usage))
        self._own.stuck.set_function(lambda: self.admission_failure is not None)
        self._own.target.set_function(lambda: _or_nan(self.target_s))
        self._own.feasible_target.set_function(lambda: _or_nan(self.feasible_target_s))
        self._own.tbt_p50.set_function(quantile(self.recent_tbt, 0.5))
        self._own.tbt_p99.set_function(quantile(self.recent_tbt, 0.99))
        self._own.ttft_p50.set_function(quantile(self.recent_ttft, 0.5))
        self._own.ttft_p99.set_function(quantile(self.recent_ttft, 0.99))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


class FiguresFor(Collector):
    """This caller's view: only admins see other keys' tenants."""

    def __init__(self, observer: Observer, caller: Caller) -> None:
        self._observer = observer
        self._caller = caller

    def collect(self) -> Iterator[Metric]:
        observer, caller = self._observer, self._caller
        if caller.is_admin or caller.is_for_metrics:
            yield from observer.collectors.collect()
            return
        own = list(observer.tenants.collect_for(caller.name))
        hidden = {family.name for family in own}
        yield from (family for family in observer.collectors.collect() if family.name not in hidden)
        yield from own


def router(observer: Observer) -> APIRouter:
    """The route /metrics."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(FiguresFor(observer, request.state.caller)), media_type=content_type)

    return routes
