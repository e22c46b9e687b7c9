"""The stall load's clients: what counts, by a literal trace; and the driver, on a fake stream, HTTP and an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from stall_client import run_clients, running_chats

from evenflow.bench.endpoints import Answer, Ask, HttpEndpoint, PolicyEndpoint
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import ClientFigures, StallRun, Wait, join, observe
from evenflow.engine.async_llm import AsyncLLM
from evenflow.errors import EndpointFailed
from evenflow.executors.fake import fake_continuation
from tests.engine.fakes import VOCAB, fake_engine, intake_of

LOAD = StallLoad(
    num_chats=2,
    chat_prompts=[[1] * 4, [2] * 4, [3] * 4],
    chat_tokens=6,
    long_prompts=[[10] * 100, [11] * 100],
    long_answer_tokens=2,
    interval=3.0,
)


def test_gaps_count_from_when_a_long_prompt_is_sent_until_its_first_token() -> None:
    times = {
        "chat-1": [99.0, 101.0, 102.0, 104.0, 104.5],
        "chat-2": [99.5, 103.5, 106.0],
        "long-1": [102.0, 102.5],
        "long-2": [104.0, 106.5],
    }
    run = observe(LOAD, 100.0, times, {"long-1": 100.5, "long-2": 103.0})
    assert run.waits == [Wait(0.0, 0.5, 2.0), Wait(3.0, 3.0, 4.0)]
    assert [(token.request_id, token.at, token.gap) for token in run.counted] == [
        ("chat-1", 1.0, 2.0),
        ("chat-1", 2.0, 1.0),
        ("chat-2", 3.5, 4.0),
        ("chat-1", 4.0, 2.0),
    ]
    assert [(token.at, token.gap) for token in run.tokens if not token.counts] == [
        (2.5, 0.5),  # the long prompts' own tokens are a stream like any other
        (4.5, 0.5),
        (6.0, 2.5),
        (6.5, 2.5),
    ]
    assert run.long_ttft_s == [2.0, 1.0]  # from when they were due
    assert run.pending_s == 1.5 + 1.0
    assert (run.total_s, run.output_tokens, run.long_prompt_tokens) == (6.5, 10, 200)


def test_long_prompts_that_overlap_are_pending_once() -> None:
    times = {"chat-1": [100.0, 101.0], "long-1": [104.0], "long-2": [106.0]}
    assert observe(LOAD, 100.0, times, {"long-1": 101.0, "long-2": 103.0}).pending_s == 5.0
    assert observe(LOAD, 100.0, times, {"long-1": 101.0, "long-2": 101.0}).pending_s == 5.0
    times["long-2"] = [103.0]
    assert observe(LOAD, 100.0, times, {"long-1": 101.0, "long-2": 102.0}).pending_s == 3.0


def test_figures_are_of_all_runs_together() -> None:
    times = {"chat-1": [100.0, 101.0, 103.0], "long-1": [101.0, 102.0], "long-2": [103.0, 104.0]}
    run = observe(replace(LOAD, interval=1.0), 100.0, times, {"long-1": 100.0, "long-2": 101.0})
    figures = ClientFigures.of("fixed:8", None, [run, join([run, run])])
    assert (figures.num_gaps, figures.tbt_p50_s, figures.tbt_p99_s, figures.tbt_max_s) == (9, 1.0, 2.0, 2.0)
    assert (figures.long_ttft_p50_s, figures.long_ttft_max_s) == (1.5, 2.0)
    assert figures.prefill_tokens_per_s == 3 * 200 / (3 * 3.0)
    assert (figures.total_s, figures.output_tokens_per_s) == (6.0, 18 / 12.0)


@dataclass
class StepByStep:
    """Streams a token to everyone each step; a long prompt makes one step long."""

    asks: list[Ask] = field(default_factory=list)
    is_long_prompt_new: bool = False
    fail_after: int = 1000

    async def stream(self, ask: Ask, answer: Answer) -> None:
        self.asks.append(ask)
        number = len(self.asks)
        if len(ask.prompt) > 50:
            self.is_long_prompt_new = True
            await asyncio.sleep(0.02)  # so that the chats' next tokens come before its first
        for _ in range(ask.max_tokens):
            await asyncio.sleep(0.002)
            if number > self.fail_after:
                answer.error = "out of memory"
                return
            answer.add_piece(f" {number}", 1)

    async def run(self, load: StallLoad) -> StallRun:
        async def stall() -> None:
            while True:
                await asyncio.sleep(0.001)
                if self.is_long_prompt_new:
                    self.is_long_prompt_new = False
                    threading.Event().wait(0.1)  # nothing else runs

        stalls = asyncio.create_task(stall())
        try:
            return await run_clients(self.stream, load)
        finally:
            stalls.cancel()


def test_the_driver_keeps_the_chats_going_and_sees_their_stalls() -> None:
    server, load = StepByStep(), replace(LOAD, long_answer_tokens=40, interval=0.05)
    run = asyncio.run(server.run(load))
    chats = [ask for ask in server.asks if len(ask.prompt) == 4]
    assert chats == [load.chat(number) for number in range(len(chats))]
    assert len(chats) > load.num_chats
    assert [wait.due for wait in run.waits] == [0.0, 0.05]
    assert all(wait.due <= wait.sent < wait.first_token for wait in run.waits)
    assert max(token.gap for token in run.counted) >= 0.1
    assert len(run.long_answers) == 2
    assert run.total_s >= run.waits[1].first_token


@pytest.mark.parametrize("fail_after", [0, 1, 3])
def test_a_request_that_fails_ends_the_run(fail_after: int) -> None:
    with pytest.raises(EndpointFailed, match="out of memory"):
        asyncio.run(StepByStep(fail_after=fail_after).run(replace(LOAD, interval=0.01)))


def test_chats_alone() -> None:
    async def run() -> tuple[int, int]:
        async with running_chats(StepByStep().stream, LOAD) as chats:
            assert all(chat.piece_times_s for chat in chats[:2])
            before = sum(chat.num_tokens for chat in chats)
            await asyncio.sleep(0.05)
            return before, sum(chat.num_tokens for chat in chats)

    before, after = asyncio.run(run())
    assert after > before >= 2


def test_on_an_embedded_engine_the_answers_are_those_of_the_prompts() -> None:
    async def run() -> list[str]:
        engine = fake_engine()
        async with AsyncLLM.over(engine, intake_of(engine)) as llm:
            endpoint = PolicyEndpoint("fixed:64", llm)
            return (await run_clients(endpoint.stream, replace(LOAD, interval=0.02))).long_answers

    expected = [fake_continuation(prompt, 2, VOCAB) for prompt in LOAD.long_prompts]
    assert asyncio.run(run()) == ["".join(f" {token}" for token in tokens) for tokens in expected]


class Handler(BaseHTTPRequestHandler):
    """A completions API that answers in single tokens, 2 ms apart."""

    def do_GET(self) -> None:
        content = json.dumps({"data": [{"id": "model"}]}).encode()
        self._start("application/json", len(content))
        self.wfile.write(content)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._start("text/event-stream")
        for number in range(body["max_tokens"]):
            threading.Event().wait(0.002)
            event = {"choices": [{"text": f" {body['prompt'][0]}", "finish_reason": None}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
            assert number < 100

    def _start(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def handle(self) -> None:
        with suppress(ConnectionError):  # the chats are cut off at the end
            super().handle()

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_over_http() -> None:
    async def run(address: str) -> StallRun:
        endpoint = HttpEndpoint(address)
        async with endpoint.open():
            return await run_clients(endpoint.stream, replace(LOAD, interval=0.02))

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = asyncio.run(run(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert found.long_answers == [" 10 10", " 11 11"]
    figures = ClientFigures.of("default", None, [found])
    assert figures.num_gaps > 0
    assert 0 < figures.long_ttft_p50_s <= figures.long_ttft_max_s < figures.total_s
