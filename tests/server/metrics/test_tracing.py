"""A request becomes one span that tells its way, sent to a collector that is really there."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from evenflow.errors import InvalidConfig, MissingDependency
from evenflow.server.metrics.tracing import RequestTracer, make_tracer
from tests.server.stepping import ObservedEngine

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def traced(observed: ObservedEngine) -> list[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observed.observer.listen(RequestTracer(provider, "a-model"))
    observed.run()
    return list(exporter.get_finished_spans())


def test_a_span_tells_wait_chunks_and_first_token() -> None:
    observed = ObservedEngine("fixed:32", max_num_seqs=1)
    observed.add("first", 40, max_tokens=4)
    observed.add("second", 10, max_tokens=2, token=2, tenant="someone")
    first, second = traced(observed)
    assert first.attributes["gen_ai.request.id"] == "first"
    assert [event.name for event in first.events] == ["left_queue", "chunk", "chunk", "first_token"]
    chunks = [dict(event.attributes) for event in first.events if event.name == "chunk"]
    assert [(chunk["start"], chunk["length"], chunk["reason"]) for chunk in chunks] == [
        (0, 32, "budget"),
        (32, 8, "end_of_prompt"),
    ]
    attributes = second.attributes
    assert attributes["gen_ai.usage.completion_tokens"] == 2
    assert attributes["evenflow.tenant"] == "someone"
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(0.042 + 0.018 + 3 * 0.0105)
    assert second.end_time - second.start_time == pytest.approx(
        1e9 * (0.042 + 0.018 + 3 * 0.0105 + 0.020 + 0.0105), rel=1e-3
    )


def test_spans_reach_a_collector() -> None:
    received: list[tuple[str, int]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, body.count(b"llm_request")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        tracer = make_tracer(f"http://127.0.0.1:{server.server_port}/v1/traces", "a-model")
        assert tracer is not None
        observed = ObservedEngine()
        observed.observer.listen(tracer)
        observed.add("one", 10)
        observed.run()
        tracer.close()
        server.shutdown()
        thread.join()
    assert received == [("/v1/traces", 1)]


def test_no_endpoint_means_no_tracer() -> None:
    assert make_tracer(None, "a-model") is None


def test_an_endpoint_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="localhost:4318"):
        make_tracer("localhost:4318", "a-model")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(MissingDependency, match=r"evenflow\[otel\]"):
        make_tracer("http://localhost:4318/v1/traces", "a-model")
