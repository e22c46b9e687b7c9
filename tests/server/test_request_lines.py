"""Lines of the log about requests: refused ones at a bounded rate, all of them on request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from evenflow.server import request_lines
from evenflow.server.request_lines import MAX_LINES, RequestLines
from tests.server.serving import RunningServer, scripted_server

OPENAI = b'{"error": {"message": "The queue is full.", "code": "overloaded"}}'
ANTHROPIC = b'{"type": "error", "error": {"message": "No.", "details": {"error_code": "x"}}}'
OLLAMA = b'{"error": "model not found"}'


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    caplog.set_level(logging.INFO, "evenflow")
    logging.getLogger("evenflow").addHandler(handler)
    yield found
    logging.getLogger("evenflow").removeHandler(handler)


def answer(requests: RequestLines, status: int, *bodies: bytes, path: str = "/v1/completions") -> None:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "client": ("10.0.0.3", 5)}
    line = requests.begin(scope)
    line.take({"type": "http.response.start", "status": status})
    for body in bodies:
        line.take({"type": "http.response.body", "body": body})
    requests.end(line)


def run(status_and_bodies: list[tuple[int, bytes]], **options: Any) -> None:
    async def main() -> None:
        requests = RequestLines(**options)
        for status, body in status_and_bodies:
            answer(requests, status, body)
        requests.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (OPENAI, "503 overloaded. The queue is full."),
        (ANTHROPIC, "503 x. No."),
        (OLLAMA, "503. model not found"),
        (b"no JSON", "503. "),
        (b'{"error": {"message": "\\u001b[31m\\nfake line"}}', r"503. \x1b[31m\nfake line"),
        (b"[" * 100_000, "503. "),
    ],
)
def test_a_refused_request_has_a_line_with_its_reason(lines: list[logging.LogRecord], body: bytes, said: str) -> None:
    run([(503, body), (200, b"")])
    [line] = lines
    assert line.getMessage() == f"Refused POST /v1/completions from 10.0.0.3: {said}"


def test_the_lines_about_refusals_are_bounded_and_the_others_counted(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    run([(429, OPENAI)] * (MAX_LINES + 20) + [(401, OPENAI)] * 3)
    assert len(lines) == MAX_LINES + 1
    assert lines[-1].getMessage() == "Refused 23 more requests: 3 with 401, 20 with 429."

    async def two_intervals() -> None:
        requests = RequestLines()
        for _ in range(2):
            for _ in range(MAX_LINES + 1):
                answer(requests, 429, OPENAI)
            while requests._interval is not None:
                await asyncio.sleep(0)
        requests.close()

    lines.clear()
    monkeypatch.setattr(request_lines, "INTERVAL_S", 0.0)
    asyncio.run(two_intervals())
    assert [line.getMessage().startswith("Refused 1 more") for line in lines] == ([False] * MAX_LINES + [True]) * 2


def test_monitors_that_find_the_server_starting_have_no_line(lines: list[logging.LogRecord]) -> None:
    async def main() -> None:
        requests = RequestLines()
        answer(requests, 503, OPENAI, path="/ready")
        requests.close()

    asyncio.run(main())
    assert not lines


def ended(server: RunningServer, lines: list[logging.LogRecord], count: int) -> list[dict[str, Any]]:
    server.until(lambda: len(lines) >= count)
    return [line.fields for line in lines]  # type: ignore[attr-defined]


def test_an_access_log_has_every_request_and_no_text(lines: list[logging.LogRecord]) -> None:
    settings = {"access_log": True, "api_keys": ["a name=acme", "b"]}
    with scripted_server(script="secret", settings=settings) as server:
        lines.clear()
        headers = {"Authorization": "Bearer a"}
        body = {"prompt": "secret", "stream": True, "max_tokens": 3, "ignore_eos": True}
        response = server.post("/v1/completions?secret=1", body, headers=headers)
        assert server.get("/health").is_success
        found = ended(server, lines, 2)
        assert [(one["method"], one["path"], one["key"], one["status"]) for one in found] == [
            ("POST", "/v1/completions", "acme", 200),
            ("GET", "/health", "", 200),
        ]
        assert found[0]["bytes"] == len(response.content)
        assert found[0]["seconds"] > 0
        assert server.get("/v1/models").status_code == 401
        assert ended(server, lines, 4)[-1]["code"] == "invalid_api_key"
    assert "secret" not in "".join(line.getMessage() for line in lines)


def test_without_it_only_refusals_have_lines(lines: list[logging.LogRecord]) -> None:
    with scripted_server(settings={"api_keys": ["a"]}) as server:
        lines.clear()
        assert server.get("/health").is_success
        assert server.get("/v1/models/%1b").status_code == 401
        [found] = ended(server, lines, 1)
    assert (found["status"], found["code"], found["key"]) == (401, "invalid_api_key", "")
    assert "\x1b" not in lines[0].getMessage()
