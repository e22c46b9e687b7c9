"""What the front remembers is bounded, whatever comes: each test feeds it far more than the bound."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from evenflow.core.grammar import Grammar
from evenflow.core.plan import ChunkReason
from evenflow.core.report import ChunkReport, StepReport
from evenflow.errors import InvalidRequest
from evenflow.hosts.reporter import Reporter
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api import grammar_gate
from evenflow.server.api.fair_slots import FairSlots
from evenflow.server.api.request_chunks import MAX_FINISHED, RecentRequests
from evenflow.server.api.responses.store import ResponseStore, StoreBounds, StoredResponse
from evenflow.server.errors import ApiError
from evenflow.server.gate import Gate, ServerLimits
from evenflow.server.live.feed import LiveFeed
from evenflow.server.metrics import request_log
from evenflow.server.metrics.distributions import RecentQuantiles
from evenflow.server.metrics.observer import MAX_CHUNKS, Observer, ServedRequest
from evenflow.server.metrics.tenants import MAX_TENANTS, TenantFigures
from tests.server.stepping import SteppedEngine

EVENTS = 100_000


def a_report(chunks: Sequence[ChunkReport] = ()) -> StepReport:
    engine = SteppedEngine()
    engine.add("a", 10)
    return engine.step()._replace(chunks=list(chunks), admissions=[])


def chunk(request_id: str) -> ChunkReport:
    return ChunkReport(request_id, 0, 16, ChunkReason.FLOOR, 0.01, gave_token=False)


def test_labels_of_tenants() -> None:
    figures = TenantFigures({})
    for number in range(EVENTS // 10):
        figures.count("key", f"tenant-{number}", number % 7, 1, 0.0)
    assert len(figures._by_key["key"]) == MAX_TENANTS + 1


def test_chunks_of_a_request_that_never_ends() -> None:
    observer = Observer("a-model")
    observer.on_request_started(ServedRequest("a", "", 16, 1, started_at=0.0))
    report = a_report([chunk("a")] * 100)
    for _ in range(EVENTS // 100):
        observer.on_step(report)
    assert len(observer.requests["a"].chunks) == MAX_CHUNKS


def test_requests_that_have_ended() -> None:
    recent = RecentRequests(Observer("a-model"))
    for number in range(EVENTS):
        record = ServedRequest(f"r{number}", "", 16, 1, started_at=0.0)
        record.chunks.extend([(0.0, chunk("r"))] * (number % 50 * (number % 1000 == 0)))
        recent.on_request_finished(record)
    assert len(recent._finished) <= MAX_FINISHED
    assert recent._num_chunks == sum(len(record.chunks) for record in recent._finished)


def test_steps_and_stalls_of_the_live_page() -> None:
    observer = Observer("a-model")
    feed = LiveFeed(observer)
    report = a_report()
    for number in range(EVENTS // 10):
        feed.on_step(report._replace(chunks=[chunk(f"gone{number}")]))
    assert len(feed._rows) <= 4096
    assert not feed._numbers  # of requests that are not open


def test_stored_responses() -> None:
    rng = random.Random(0)
    bounds = StoreBounds(max_responses=20, max_bytes=5_000, max_total_responses=60, max_total_bytes=12_000)
    store = ResponseStore(bounds)
    for number in range(EVENTS // 2):
        share = f"share{number % 997}"
        response = b"x" * rng.choice((1, 90, 900, 4_999, 6_000))
        stored = StoredResponse(
            owner=share, tenant=share, share=share, response=response, input_items=b"", output_items=b""
        )
        store.add(f"r{number}", stored)
        assert store.num_bytes <= bounds.max_total_bytes
    assert len(store) <= bounds.max_total_responses
    assert len(store._shares) == len(store._share_bytes) <= len(store)


def test_recent_quantiles_of_any_values_at_any_time() -> None:
    rng = random.Random(0)
    recent = RecentQuantiles(10)
    for number in range(EVENTS):
        recent.observe(rng.lognormvariate(0, 9), 1, 0.01 * number - rng.choice((0, 0, 50)))
    assert len(recent._slots) <= 11
    assert max(len(slot) for _, slot in recent._slots) < 5000


def test_queues_of_tenants_at_the_gate() -> None:
    gate = Gate(ServerLimits(max_waiting=4), lambda: 4, lambda reason: None)
    rooms = []
    for number in range(EVENTS // 5):
        try:
            rooms.append(gate.enter(f"tenant{number}", 1, f"class{number % 3}").__enter__())
            rooms[-1].take_tokens(5)
        except ApiError:
            rooms.pop(0).__exit__()
    for room in rooms:
        room.__exit__()
    assert not gate._requests
    assert not gate._tokens


def test_clients_that_wait_for_slots_and_leave() -> None:
    async def main() -> None:
        slots = FairSlots(2, 1, 8, "work")

        async def work(client: str) -> None:
            async with slots.slot(client):
                await asyncio.sleep(0)

        for _ in range(EVENTS // 1000):
            tasks = [asyncio.create_task(work(f"client{number}")) for number in range(50)]
            await asyncio.sleep(0)
            for task in tasks[::3]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert not slots._waiting
        assert not slots._running
        assert slots._num_free == 2

    asyncio.run(main())


def test_grammars_whose_result_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Helper:
        def __init__(self, *_: object) -> None:
            pass

        async def ask(self, question: bytes) -> bytes:
            return b"too long" * (len(question) % 2)

    async def main() -> None:
        monkeypatch.setattr(grammar_gate, "HelperProcess", Helper)
        gate = grammar_gate.GrammarGate(cast(Tokenizer, None), 0)
        for number in range(EVENTS // 10):
            with contextlib.suppress(InvalidRequest):
                await gate.check(Grammar("regex", str(number)), f"client{number}")
        await asyncio.sleep(0)
        assert len(gate._known) <= 4096
        assert not gate._pending
        assert not gate._slots._waiting

    asyncio.run(main())


def test_lines_of_a_request_log_whose_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_log, "_CLOSE_S", 0.0)
    monkeypatch.setattr(request_log._Writer, "run", lambda self: None)
    observer = Observer("a-model")
    log = request_log.RequestLog(tmp_path / "requests.jsonl", observer)
    report = a_report()
    for number in range(EVENTS // 5):
        name = f"r{number}"
        observer.on_request_started(ServedRequest(name, "", 16, 1, started_at=0.0))
        observer.on_step(report._replace(ids=[name], tokens=[(1,)]))
        observer.on_request_finished(name, "stop", 1)
    assert log._lines.qsize() <= 10_000
    assert log._writer.num_dropped > 0
    assert not log._gaps
    assert not observer._last_token_at
    log.close()
    log._writer._file.close()


@pytest.mark.parametrize("is_read", [True, False])
def test_what_a_host_reports_to_a_front_that_does_not_read(tmp_path: Path, is_read: bool) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as front:
        front.bind(str(tmp_path / "steps"))
        front.listen()
        reporter = Reporter(logging.getLogger("test"), str(tmp_path / "steps"))
        report = a_report()
        for number in range(EVENTS // 10):
            reporter.arrived(f"request-{number}" + "x" * 500, 0.0, 10, 1)
            reporter.left(f"request-{number}" + "x" * 500, 1)
            reporter.report(report)
            if number == 0 and is_read:
                reader, _ = front.accept()
                reader.setblocking(False)
            while is_read:
                try:
                    reader.recv(1 << 20)
                except BlockingIOError:
                    break
        assert len(reporter._arrived) == len(reporter._left) <= (0 if is_read else 10_000)
        assert reporter._sender is not None
        assert len(reporter._sender._unsent) < 4.1 * (1 << 20)
        reporter.close()
        if is_read:
            reader.close()
