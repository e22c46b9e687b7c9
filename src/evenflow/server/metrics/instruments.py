"""All metrics: names, types, labels, buckets. The `vllm:` ones match vLLM 0.32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from evenflow.core.plan import ChunkReason
from evenflow.core.report import CauseKind
from evenflow.core.request import FinishReason
from evenflow.server.metrics.distributions import BulkHistogram, SplitBulkHistogram
from evenflow.server.metrics.tenants import TenantFigures

PROMPT_SOURCES = ("local_compute", "local_cache_hit")
STEP_PARTS = ("decode", "prefill")
FAULTS = ("step", "engine")
TIER_EVENTS = ("saved", "restored", "lost", "recomputed")
TIER_DIRECTIONS = ("out", "in")
REFUSALS = ("queue_full", "class_limit", "tenant_limit", "late", "expired", "draining")

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TBT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1)

_PHASES = (  # of a request: name, text, ServedRequest's fields for start and end
    ("vllm:e2e_request_latency_seconds", "Arrival to end.", "started_at", "finished_at"),
    ("vllm:request_queue_time_seconds", "Arrival to first step.", "started_at", "admitted_at"),
    ("vllm:request_prefill_time_seconds", "First step to first token.", "admitted_at", "first_token_at"),
    ("vllm:request_decode_time_seconds", "First token to last.", "first_token_at", "last_token_at"),
    ("vllm:request_inference_time_seconds", "First step to last token.", "admitted_at", "last_token_at"),
)
_REQUEST_TOKENS = (  # name, text, ServedRequest's field
    ("vllm:request_prompt_tokens", "Tokens of a request's prompt.", "num_prompt_tokens"),
    ("vllm:request_generation_tokens", "Tokens generated for a request.", "num_output_tokens"),
    ("vllm:request_max_num_generation_tokens", "Most tokens that a request could get.", "max_tokens"),
    ("vllm:request_params_max_tokens", "A request's max_tokens.", "max_tokens"),
    ("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", "num_computed_tokens"),
)

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram)


class MetricFactory:
    """Creates metrics with the labels common to all of vLLM's."""

    def __init__(self, collectors: CollectorRegistry, model_name: str) -> None:
        self._collectors = collectors
        self._labels = {"model_name": model_name, "engine": "0"}

    def counter(self, name: str, text: str) -> Counter:
        return self._create(Counter, name, text, self._labels).labels(**self._labels)

    def gauge(self, name: str, text: str) -> Gauge:
        return self._create(Gauge, name, text, self._labels).labels(**self._labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return self._create(Histogram, name, text, self._labels, buckets=buckets).labels(**self._labels)

    def bulk_histogram(self, names: dict[str, str], buckets: tuple[float, ...]) -> BulkHistogram:
        metric = BulkHistogram(names, buckets, self._labels)
        self._collectors.register(metric)
        return metric

    def split_gauge(self, name: str, text: str, label: str) -> Callable[[str], Gauge]:
        """The gauge for a label's value."""
        return cache(partial(self._create(Gauge, name, text, [*self._labels, label]).labels, *self._labels.values()))

    def split_histogram(self, name: str, text: str, label: str, buckets: tuple[float, ...]) -> SplitBulkHistogram:
        """The histogram for a label's value."""
        metric = SplitBulkHistogram(name, text, label, buckets, self._labels)
        self._collectors.register(metric)
        return metric

    def split_counter(self, name: str, text: str, label: str, known: Iterable[str] = ()) -> Callable[[str], Counter]:
        """The counter for a label's value. `known` values start at 0, so that rates include their first increment."""
        metric = self._create(Counter, name, text, [*self._labels, label])
        counter = cache(partial(metric.labels, *self._labels.values()))
        for value in known:
            counter(value)
        return counter

    def tenant_figures(self) -> TenantFigures:
        figures = TenantFigures(self._labels)
        self._collectors.register(figures)
        return figures

    def info(self, name: str, text: str, values: dict[str, str]) -> None:
        """A gauge that is always 1; its labels are the information."""
        labels = {**values, "engine": self._labels["engine"]}
        self._create(Gauge, name, text, labels).labels(**labels).set(1)

    def _create(self, kind: type[_Metric], name: str, text: str, labels: Iterable[str], **options: Any) -> _Metric:
        namespace = subsystem = unit = ""
        return kind(name, text, list(labels), namespace, subsystem, unit, self._collectors, **options)


class VllmMetrics:
    """vLLM's metrics for its dashboards, as far as this engine has them."""

    def __init__(self, factory: MetricFactory) -> None:
        counter, gauge, histogram, split = factory.counter, factory.gauge, factory.histogram, factory.split_counter
        self.running = gauge("vllm:num_requests_running", "Requests that hold a slot.")
        self.waiting = gauge("vllm:num_requests_waiting", "Requests that wait for a slot or for memory.")
        self.kv_cache_usage = gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.")
        self.prefix_queries = counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.")
        self.prefix_hits = counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self.preemptions = counter("vllm:num_preemptions", "Preempted requests that got a slot again.")
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests with a first token.")
        self.prompt_tokens_by_source = split(
            "vllm:prompt_tokens_by_source", "These by source.", "source", PROMPT_SOURCES
        )
        self.prompt_tokens_cached = counter("vllm:prompt_tokens_cached", "Those that were cached.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens generated.")
        self.request_success = split("vllm:request_success", "Finished requests.", "finished_reason", FinishReason)
        self.iteration_tokens = histogram("vllm:iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self.params_n = histogram("vllm:request_params_n", "Choices per API request.", (1, 2, 5, 10, 20))
        self.request_preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT_S)
        self.inter_token = factory.bulk_histogram(
            {
                "vllm:inter_token_latency_seconds": "Between two tokens of a stream.",
                "vllm:time_per_output_token_seconds": "The same, under its older name.",
            },
            _TBT_S,
        )
        self.request_tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "A request's mean time between tokens.", _TBT_S
        )
        self.phases = [(start, end, histogram(name, text, _LATENCY_S)) for name, text, start, end in _PHASES]


def token_histograms(factory: MetricFactory, max_model_len: int) -> list[tuple[str, Histogram]]:
    """vLLM's histograms with buckets up to the model's context, each with its ServedRequest field."""
    buckets = tuple(
        float(mantissa * 10**exponent)
        for exponent in range(len(str(max_model_len)))
        for mantissa in (1, 2, 5)
        if mantissa * 10**exponent <= max_model_len
    )
    return [(field, factory.histogram(name, text, buckets)) for name, text, field in _REQUEST_TOKENS]


class EvenflowMetrics:
    """evenflow's own metrics: fill and time of steps, causes of late tokens."""

    def __init__(self, factory: MetricFactory) -> None:
        counter, gauge, histogram, split = factory.counter, factory.gauge, factory.histogram, factory.split_counter
        self.up = gauge("evenflow:up", "1 while the engine is up.")
        self.restarts = counter("evenflow:engine_restarts", "Restarts of the engine process.")
        self.model_loaded = factory.split_gauge("evenflow:model_loaded", "1 for the model in memory.", "served_model")
        self.model_loads = split("evenflow:model_loads", "Starts of an engine with this model.", "served_model")
        self.retries = split("evenflow:retries", "Requests computed again after a fault of this.", "fault", FAULTS)
        self.stuck = gauge("evenflow:stuck", "1 while no request is admitted although one fits: a bug.")
        self.rejected = split("evenflow:rejected_requests", "Refused requests.", "reason", REFUSALS)
        self.chunk_tokens = histogram("evenflow:chunk_tokens", "Tokens of a prefill chunk.", _STEP_TOKENS)
        self.chunks = split("evenflow:chunks", "Chunks by why they were not longer.", "reason", ChunkReason)
        self.shed_tokens = counter("evenflow:shed_tokens", "Prefill rows left out by steps that turned out slow.")
        self.request_chunks = histogram("evenflow:request_chunks", "Chunks of a request.", _CHUNKS)
        self.budget_use = histogram("evenflow:step_budget_use", "Share of its token budget that a step used.", _SHARES)
        self.step_tokens = split("evenflow:step_tokens", "Tokens run, by phase.", "part", STEP_PARTS)
        self.part_seconds = split("evenflow:step_part_seconds", "Seconds of steps, by phase.", "part", STEP_PARTS)
        self.step_seconds = histogram("evenflow:step_seconds", "Duration of steps.", _STEP_S)
        self.predicted_seconds = histogram("evenflow:step_predicted_seconds", "Predicted duration of steps.", _STEP_S)
        self.prediction_error = histogram(
            "evenflow:step_prediction_error", "|predicted - actual| / actual of a step.", _SHARES
        )
        self.stalls = counter("evenflow:stalls", "Steps that made tokens late.")
        self.stall_seconds = split(
            "evenflow:stall_seconds", "Longest gap of these steps, by cause.", "cause", CauseKind
        )
        self.late_tokens = counter("evenflow:late_tokens", "Tokens after their deadline.")
        self.target = gauge("evenflow:tbt_target_seconds", "The current target; NaN if the policy has none.")
        self.feasible_target = gauge(
            "evenflow:tbt_feasible_target_seconds", "Lowest feasible target if the current one is not."
        )
        self.tier_stored = gauge("evenflow:kv_tier_stored_blocks", "KV blocks in host memory or on disk.")
        self.tier_blocks = split("evenflow:kv_tier_blocks", "KV blocks, by what became of them.", "event", TIER_EVENTS)
        self.tier_bytes = split("evenflow:kv_tier_bytes", "Bytes of KV moved.", "direction", TIER_DIRECTIONS)
        self.tier_seconds = split("evenflow:kv_tier_seconds", "Seconds of these moves.", "direction", TIER_DIRECTIONS)
        self.tbt_p50 = gauge("evenflow:tbt_p50_seconds", "Median time between tokens over the last minute.")
        self.tbt_p99 = gauge("evenflow:tbt_p99_seconds", "99th percentile of the same.")
        self.ttft_p50 = gauge("evenflow:ttft_p50_seconds", "Median time to first token over the last minute.")
        self.ttft_p99 = gauge("evenflow:ttft_p99_seconds", "99th percentile of the same.")


class ClassMetrics:
    """Metrics by class of service. The settings bound the number of classes."""

    def __init__(self, factory: MetricFactory) -> None:
        label = "service_class"
        self.open_requests = factory.split_gauge("evenflow:class_open_requests", "Requests that run or wait.", label)
        self.waiting = factory.split_gauge("evenflow:class_waiting_requests", "Those that have not begun.", label)
        self.ttft = factory.split_histogram("evenflow:class_ttft_seconds", "Arrival to first token.", label, _TTFT_S)
        self.tbt = factory.split_histogram("evenflow:class_tbt_seconds", "Time between tokens.", label, _TBT_S)
        self.requests = factory.split_counter("evenflow:class_requests", "Finished requests.", label)
        self.prompt_tokens = factory.split_counter("evenflow:class_prompt_tokens", "Their prompt tokens.", label)
        self.tokens = factory.split_counter("evenflow:class_generation_tokens", "Their generated tokens.", label)
