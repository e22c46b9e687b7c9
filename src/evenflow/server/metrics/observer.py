"""What Prometheus sees, derived from step reports and from requests that start and finish.

The server notifies `Observer`, always on the same thread; the live page and traces listen to it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fastapi import APIRouter, Request, Response
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry
from prometheus_client.exposition import choose_encoder

from evenflow.core.report import ChunkReport, StepReport
from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.instruments import EvenflowMetrics, Maker, VllmMetrics, VllmRequestTokens

WINDOW_S = 60  # that the attained quantiles are taken over
MAX_TENANTS = 100  # with figures of their own: a label value costs memory for good, and tenants can be made up
MAX_TENANT_CHARACTERS = 64
OTHER_TENANTS = "other"


@dataclass(frozen=True, slots=True)
class EngineState:
    """What changes with the engine process, not with its steps."""

    is_up: bool
    num_restarts: int = 0
    max_model_len: int = 0  # 0: not known yet
    num_blocks: int = 0
    block_size: int = 0
    policy: str = ""  # for the next step; each report has its own
    target_s: float | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request's life in the server. Times are the clock's; None: not yet."""

    request_id: str
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    started_at: float
    admitted_at: float | None = None  # the start of the first step that it was part of
    first_token_at: float | None = None
    last_token_at: float | None = None
    num_cached_tokens: int = 0  # at its first admission
    num_preemptions: int = 0
    chunks: list[tuple[float, ChunkReport]] = field(default_factory=list)  # each with the time of its commit
    num_output_tokens: int = 0
    finish_reason: str = ""
    finished_at: float = 0.0


class Listener:
    """Follows an Observer. Does nothing by itself."""

    def on_engine_state(self, state: EngineState) -> None:
        """The engine process came up, went down or was started anew."""

    def on_step(self, report: StepReport) -> None:
        """A step was committed."""

    def on_request_finished(self, record: RequestRecord) -> None:
        """A request ended, whatever the reason."""


class Observer:
    """Turns the engine's state, steps and requests into figures."""

    def __init__(self, model_name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self.model_name = model_name
        self.clock = clock  # the one that events and calls take their times from
        self.collectors = CollectorRegistry()
        self.engine_state = EngineState(is_up=False)
        self.recent_tbt = RecentQuantiles(WINDOW_S)
        self.recent_ttft = RecentQuantiles(WINDOW_S)
        self.requests: dict[str, RequestRecord] = {}  # that have not ended
        self._make = Maker(self.collectors, model_name)
        self._vllm = VllmMetrics(self._make)
        self._own = EvenflowMetrics(self._make)
        self._request_tokens: VllmRequestTokens | None = None
        self._last_token_at: dict[str, float] = {}  # apart from the records: every token looks here
        self._tenants: set[str] = set()
        self._listeners: list[Listener] = []
        self._show_recent_quantiles()
        self.collectors.register(PROCESS_COLLECTOR)

    def listen(self, listener: Listener) -> None:
        """Notify this one too, from now on."""
        self._listeners.append(listener)

    # ---- the engine ----

    def on_engine_state(self, state: EngineState) -> None:
        """The engine process came up (with its limits known), went down, or was started anew."""
        self._own.up.set(state.is_up)
        self._own.restarts.inc(state.num_restarts - self.engine_state.num_restarts)
        self._show_target(state.target_s, None)
        self.engine_state = state
        if state.max_model_len and self._request_tokens is None:
            self._request_tokens = VllmRequestTokens(self._make, state.max_model_len)
            sizes = {"block_size": str(state.block_size), "num_gpu_blocks": str(state.num_blocks)}
            self._make.info("vllm:cache_config_info", "The KV cache's sizes.", sizes)
        if not state.is_up:
            self._show_nothing_runs()
        for listener in self._listeners:
            listener.on_engine_state(state)

    def on_step(self, report: StepReport) -> None:
        """A step was committed. Call this before `on_request_finished` of the requests that it ended."""
        self._take_requests(report)
        self._take_tokens(report)
        self._show_step(report)
        self._show_queue(report)
        self._show_lateness(report)
        for listener in self._listeners:
            listener.on_step(report)

    # ---- requests ----

    def on_request_started(
        self,
        request_id: str,
        *,
        tenant: str,
        num_prompt_tokens: int,
        max_tokens: int,
        now: float,
        n: int | None = 1,
    ) -> None:
        """A request goes to the engine; `now` is when it arrived.

        A call for several answers is several requests: `n` is their number with the first of them, None with the rest.
        """
        self.requests[request_id] = RequestRecord(request_id, tenant, num_prompt_tokens, max_tokens, now)
        if n is not None:
            self._vllm.params_n.observe(n)

    def on_request_finished(self, request_id: str, reason: str, num_output_tokens: int, now: float) -> None:
        """A request ended: by stop, length, abort or error. Every request that was started must come here, once."""
        record = self.requests.pop(request_id)
        record.last_token_at = self._last_token_at.pop(request_id, None)
        record.finish_reason, record.num_output_tokens, record.finished_at = reason, num_output_tokens, now
        self._show_request(record)
        self._show_phases(record)
        if not self.requests:  # there may be no further step to say so
            self._show_nothing_runs()
        for listener in self._listeners:
            listener.on_request_finished(record)

    def on_request_rejected(self, reason: str) -> None:
        """A request was refused for want of room; `reason` is one of a few words."""
        self._own.rejected.inc(1, reason)

    # ---- from events to figures ----

    def _take_requests(self, report: StepReport) -> None:
        """Note which requests were admitted and which chunks they got."""
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
                record.num_cached_tokens = admission.num_cached_tokens
        for chunk in report.chunks:
            self._own.chunk_tokens.observe(chunk.length)
            self._own.chunks.inc(1, chunk.reason)
            if (record := self.requests.get(chunk.request_id)) is not None:
                record.chunks.append((report.at, chunk))

    def _take_tokens(self, report: StepReport) -> None:
        """Measure the gap before each token: all streams of a step at once, for there are few different gaps."""
        resumed = []
        for chunk in report.chunks:
            if chunk.gave_token and chunk.request_id in self._last_token_at:
                resumed.append(chunk.request_id)
            elif chunk.gave_token and (record := self.requests.get(chunk.request_id)) is not None:
                self._take_first_token(record, report.at)
        self._take_gaps([*report.decoded, *resumed], report.at)
        self._vllm.generation_tokens.inc(report.num_output_tokens)

    def _take_first_token(self, record: RequestRecord, now: float) -> None:
        record.first_token_at = self._last_token_at[record.request_id] = now
        ttft = now - record.started_at
        self._vllm.ttft.observe(ttft)
        self.recent_ttft.observe(ttft, 1, now)
        cached = min(record.num_cached_tokens, record.num_prompt_tokens)
        self._vllm.prompt_tokens.inc(record.num_prompt_tokens)
        self._vllm.prompt_tokens_cached.inc(cached)
        self._vllm.prompt_tokens_by_source.inc(record.num_prompt_tokens - cached, "local_compute")
        self._vllm.prompt_tokens_by_source.inc(cached, "local_cache_hit")

    def _take_gaps(self, request_ids: Iterable[str], now: float) -> None:
        last = self._last_token_at
        known = [request_id for request_id in request_ids if request_id in last]
        for gap, count in Counter([now - last[request_id] for request_id in known]).items():
            self._vllm.inter_token.observe(gap, count)
            self.recent_tbt.observe(gap, count, now)
        last.update(dict.fromkeys(known, now))

    def _show_step(self, report: StepReport) -> None:
        own, num_prefill_tokens = self._own, report.num_prefill_tokens
        num_tokens = report.num_decodes + num_prefill_tokens
        self._vllm.iteration_tokens.observe(num_tokens)
        own.budget_use.observe(num_tokens / report.budget)
        own.step_tokens.inc(report.num_decodes, "decode")
        own.step_tokens.inc(num_prefill_tokens, "prefill")
        own.part_seconds.inc(report.decode_seconds, "decode")
        own.part_seconds.inc(max(0.0, report.seconds - report.decode_seconds), "prefill")
        own.step_seconds.observe(report.seconds)
        if report.predicted_seconds and report.seconds:
            own.predicted_seconds.observe(report.predicted_seconds)
        if (error := report.prediction_error) is not None:
            own.prediction_error.observe(error)

    def _show_queue(self, report: StepReport) -> None:
        if not self.requests:  # all were aborted while this step ran, and no step will say so
            return
        self._vllm.running.set(report.num_running)
        self._vllm.waiting.set(report.num_waiting)
        self._vllm.kv_cache_usage.set(report.kv_cache_usage)

    def _show_nothing_runs(self) -> None:
        for gauge in (self._vllm.running, self._vllm.waiting, self._vllm.kv_cache_usage):
            gauge.set(0)

    def _show_target(self, target_s: float | None, feasible_target_s: float | None) -> None:
        self._own.target.set(math.nan if target_s is None else target_s)
        self._own.feasible_target.set(math.nan if feasible_target_s is None else feasible_target_s)

    def _show_lateness(self, report: StepReport) -> None:
        self._show_target(report.target_s, report.feasible_target_s)
        self._own.late_tokens.inc(len(report.late))
        if (stall := report.stall) is not None:
            self._own.stalls.inc()
            for cause in stall.causes:
                self._own.stall_seconds.inc(cause.seconds, cause.kind)

    def _show_request(self, record: RequestRecord) -> None:
        tenant = self._tenant_label(record.tenant)
        self._vllm.request_success.inc(1, record.finish_reason)
        self._vllm.request_preemptions.observe(record.num_preemptions)
        self._own.request_chunks.observe(len(record.chunks))
        self._own.tenant_requests.inc(1, tenant)
        self._own.tenant_prompt_tokens.inc(record.num_prompt_tokens, tenant)
        self._own.tenant_generation_tokens.inc(record.num_output_tokens, tenant)
        if (tokens := self._request_tokens) is not None:
            tokens.prompt.observe(record.num_prompt_tokens)
            tokens.generation.observe(record.num_output_tokens)
            tokens.max_generation.observe(record.max_tokens)
            tokens.params_max_tokens.observe(record.max_tokens)
            tokens.computed.observe(max(0, record.num_prompt_tokens - record.num_cached_tokens))

    def _show_phases(self, record: RequestRecord) -> None:
        """Where the request's time went. A phase that it did not reach the end of is left out."""
        self._vllm.e2e.observe(record.finished_at - record.started_at)
        if record.admitted_at is None:
            return
        self._vllm.queue.observe(record.admitted_at - record.started_at)
        if record.first_token_at is None or record.last_token_at is None:
            return
        decode_s = record.last_token_at - record.first_token_at
        self._vllm.prefill.observe(record.first_token_at - record.admitted_at)
        self._vllm.decode.observe(decode_s)
        self._vllm.inference.observe(record.last_token_at - record.admitted_at)
        if record.num_output_tokens > 1:
            self._vllm.request_tpot.observe(decode_s / (record.num_output_tokens - 1))

    def _tenant_label(self, tenant: str) -> str:
        label = tenant[:MAX_TENANT_CHARACTERS]
        if label not in self._tenants and len(self._tenants) == MAX_TENANTS:
            return OTHER_TENANTS
        self._tenants.add(label)
        return label

    def _show_recent_quantiles(self) -> None:
        """Quantiles are reckoned when somebody asks for them."""

        def quantile(recent: RecentQuantiles, share: float) -> Callable[[], float]:
            def value() -> float:
                (found,) = recent.quantiles((share,), self.clock(), WINDOW_S)
                return math.nan if found is None else found

            return value

        self._own.tbt_p50.set_function(quantile(self.recent_tbt, 0.5))
        self._own.tbt_p99.set_function(quantile(self.recent_tbt, 0.99))
        self._own.ttft_p50.set_function(quantile(self.recent_ttft, 0.5))
        self._own.ttft_p99.set_function(quantile(self.recent_ttft, 0.99))


def router(observer: Observer) -> APIRouter:
    """The route /metrics."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=Response, summary="Figures for Prometheus")
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(observer.collectors), media_type=content_type)

    return routes
