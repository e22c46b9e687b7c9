"""The benchmark's own client, against a real HTTP server and against an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from evenflow.bench.endpoints import Answer, Ask, HttpEndpoint
from evenflow.errors import EndpointFailed


class Handler(BaseHTTPRequestHandler):
    """Speaks as much of the API as the client needs, in pieces that include one without text."""

    seen: list[tuple[dict[str, Any], str | None]]

    def do_GET(self) -> None:
        models = {"data": [{"id": "small", "max_model_len": 99}, {"id": "large"}]}
        self._send(200, json.dumps(models).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append((body, self.headers["Authorization"]))
        if body.get("prompt") == "bad":
            self._send(400, b'{"error": {"message": "no such prompt"}}', "application/json")
            return
        details = {"cached_tokens": 5} if body.get("prompt") == "cached" else None
        events: list[dict[str, Any]] = [
            {"choices": [{"text": "on", "finish_reason": None}]},
            {"choices": [{"text": "", "finish_reason": None}]},
            {"choices": [{"text": "ce", "finish_reason": "length"}]},
            {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 8, "prompt_tokens_details": details}},
        ]
        if body.get("prompt") == "broken":
            events[2] = {"error": {"message": "the engine stopped"}}
        if body.get("prompt") == "odd":
            events[0]["choices"][0]["text"] = "on\u2028\x85\r"  # a line ends there for some, but not for JSON
        data = (json.dumps(event, ensure_ascii=False) for event in events)
        lines = "".join(f"data: {one}\n\n" for one in data) + "data: [DONE]\n\n"
        self._send(200, lines.encode(), "text/event-stream")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def address() -> Iterator[str]:
    Handler.seen = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def ask(endpoint: HttpEndpoint, prompt: str) -> Answer:
    async def run() -> Answer:
        async with endpoint.open():
            await endpoint.begin_round()
            await endpoint.stream(Ask(prompt, 3), answer := Answer())
            return answer

    return asyncio.run(run())


def test_pieces_text_and_tokens_of_an_answer(address: str) -> None:
    answer = ask(HttpEndpoint(address, api_key="secret"), "go")
    assert (answer.text, answer.num_tokens, len(answer.piece_times_s), answer.error) == ("once", 3, 3, None)
    assert len(answer.gaps_s) == 2
    body, authorization = Handler.seen[0]
    assert (body["model"], body["prompt"], body["max_tokens"], body["temperature"]) == ("small", "go", 3, 0)
    assert authorization == "Bearer secret"


def test_only_a_newline_ends_an_event(address: str) -> None:
    assert ask(HttpEndpoint(address), "odd").text == "on\u2028\x85\rce"


def test_cached_tokens_are_known_if_the_server_reports_them(address: str) -> None:
    known, unknown = (ask(HttpEndpoint(address), prompt) for prompt in ("cached", "go"))
    assert (known.num_prompt_tokens, known.num_cached_tokens) == (8, 5)
    assert (unknown.num_prompt_tokens, unknown.num_cached_tokens) == (8, None)


def test_the_context_is_known_if_the_server_lists_it(address: str) -> None:
    small, large = HttpEndpoint(address, model="small"), HttpEndpoint(address, model="large")
    for endpoint in (small, large):
        ask(endpoint, "go")
    assert (small.max_model_len, large.max_model_len) == (99, None)


def test_a_refusal_and_a_failure_on_the_way_are_errors_of_the_answer(address: str) -> None:
    assert "status 400" in (ask(HttpEndpoint(address), "bad").error or "")
    assert ask(HttpEndpoint(address), "broken").error == "the engine stopped"


def test_logprobs_need_a_server_that_returns_them(address: str) -> None:
    async def run(prompt: str) -> None:
        endpoint = HttpEndpoint(address)
        async with endpoint.open():
            await endpoint.score(prompt, [" a", " b"])

    with pytest.raises(EndpointFailed, match="does not echo a prompt with its logprobs"):
        asyncio.run(run("go"))
    with pytest.raises(EndpointFailed, match=r"status 400: .*no such prompt"):
        asyncio.run(run("bad"))


def test_only_what_was_asked_for_is_sent(address: str) -> None:
    """Strict servers refuse fields that they do not know."""

    async def run() -> None:
        async with (endpoint := HttpEndpoint(address)).open():
            chat = [{"role": "user", "content": "Hi"}]
            await endpoint.stream(Ask("go", 3), Answer())
            await endpoint.stream(Ask("go", 3, stop=("x",), ignore_eos=False), Answer())
            await endpoint.stream(Ask("", 3, messages=chat, ignore_eos=False), Answer())

    asyncio.run(run())
    exact, stopped, chat = (body for body, _ in Handler.seen)
    assert (exact["ignore_eos"], exact.get("stop")) == (True, None)
    assert (stopped.get("ignore_eos"), stopped["stop"]) == (None, ["x"])
    assert (chat["messages"], chat.get("prompt"), chat.get("stop")) == ([{"role": "user", "content": "Hi"}], None, None)


def test_the_model_asked_for_must_be_there(address: str) -> None:
    assert ask(HttpEndpoint(address, model="large"), "go").error is None
    assert Handler.seen[0][0]["model"] == "large"
    with pytest.raises(EndpointFailed, match="no model 'huge' but small, large"):
        ask(HttpEndpoint(address, model="huge"), "go")


def test_nobody_at_the_address() -> None:
    with pytest.raises(EndpointFailed, match=r"no server at http://127\.0\.0\.1:9 .*evenflow serve"):
        ask(HttpEndpoint("http://127.0.0.1:9"), "go")
