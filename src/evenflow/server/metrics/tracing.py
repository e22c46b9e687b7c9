"""OpenTelemetry traces: one span per request, with its queueing, chunks and first token as events.

A span is built from the request's record after its end: no cost before. Needs the extra `otel`, imported when a tracer
is made.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from evenflow.errors import InvalidConfig, MissingDependency
from evenflow.server.metrics.observer import Listener, ServedRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

_NANOSECONDS = 1_000_000_000


class RequestTracer(Listener):
    """Turns each finished request into a span."""

    def __init__(self, provider: TracerProvider, model_name: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("evenflow")
        self._model_name = model_name
        # The server's clock has an arbitrary zero; spans need the time of day.
        self._epoch = time.time() - time.perf_counter()

    def on_request_finished(self, record: ServedRequest) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            start_time=self._time_of_day(record.started_at),
            attributes={
                "gen_ai.request.id": record.request_id,
                "gen_ai.response.model": record.model or self._model_name,
                "gen_ai.request.max_tokens": record.max_tokens,
                "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": record.num_output_tokens,
                "gen_ai.response.finish_reasons": [record.finish_reason],
                "evenflow.cached_tokens": record.num_cached_tokens,
                "evenflow.preemptions": record.num_preemptions,
                "evenflow.tenant": record.tenant,
                "evenflow.service_class": record.service_class,
            },
        )
        self._add_events(span, record)
        if record.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        span.end(self._time_of_day(record.finished_at))

    def _add_events(self, span: Span, record: ServedRequest) -> None:
        if record.admitted_at is not None:
            queue_s = record.admitted_at - record.started_at
            span.set_attribute("gen_ai.latency.time_in_queue", queue_s)
            span.add_event("left_queue", {"queue_s": queue_s}, self._time_of_day(record.admitted_at))
        for at, chunk in record.chunks:
            attributes = {name: getattr(chunk, name) for name in ("start", "length", "reason", "seconds")}
            span.add_event("chunk", attributes, self._time_of_day(at))
        if record.first_token_at is not None:
            ttft_s = record.first_token_at - record.started_at
            span.set_attribute("gen_ai.latency.time_to_first_token", ttft_s)
            span.add_event("first_token", {"ttft_s": ttft_s}, self._time_of_day(record.first_token_at))

    def _time_of_day(self, at: float) -> int:
        return int((self._epoch + at) * _NANOSECONDS)

    def close(self) -> None:
        """Send the remaining spans, for at most a few seconds."""
        self._provider.shutdown()


def make_tracer(endpoint: str | None, model_name: str) -> RequestTracer | None:
    """A tracer that sends to an OTLP collector (`http://host:4318/v1/traces`); None without an endpoint."""
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(f"Got --otlp-endpoint {endpoint!r} but expected an http:// or https:// URL.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingDependency(
            f"traces need {error.name}, which is not installed: pip install 'evenflow[otel]'"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "evenflow"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=3)))
    return RequestTracer(provider, model_name)
