"""Text of a request that is made to be taken for something else: an address to ask, a log line, a header."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import httpx
import pytest

from tests.server.serving import MODEL, RunningServer, scripted_server

JSON = {"Content-Type": "application/json"}
FORGED = "\r\nERROR 12:00:00 evenflow: forged\r\nX-Forged: yes\r\n\r\n\x1b[2J"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_addresses_in_a_request_are_never_asked(kind: str, scheme: str, server: RunningServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        url = f"http://127.0.0.1:{port}/secret" if scheme == "http" else "file:///etc/passwd"
        content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": url}}]
        response = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 400
        assert "root:" not in response.text
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_text_of_a_request_begins_a_log_line(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for body in (
            {"prompt": FORGED, "model": FORGED},
            {"prompt": "a", "tenant": FORGED, "user": FORGED},
            {"prompt": "a", "stop": [FORGED], "max_tokens": 1},
            {"prompt": "a", "guided_regex": "(" + FORGED},
            {FORGED: FORGED},
        ):
            server.post("/v1/completions", body)
        server.post("/v1/chat/completions", {"messages": [{"role": FORGED, "content": FORGED}]})
        server.get("/v1/requests/" + "%0d%0aforged")
    logged = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]  # the client's
    lines = [logging.Formatter().format(record) for record in logged]
    assert any("forged" in line for line in lines)  # refusals quote it
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_no_text_of_a_request_becomes_a_header(server: RunningServer) -> None:
    responses = [
        server.post("/v1/completions", {"prompt": "a", "model": FORGED, "max_tokens": 1}),
        server.post("/v1/completions", {"prompt": "a", "tenant": FORGED, "max_tokens": 1}),
        server.get("/%0d%0aX-Forged:%20yes"),
        server.get("/v1/models/%0d%0aX-Forged:%20yes"),
        server.get("/live%0d%0aX-Forged:%20yes/"),
        server.get("/v1/models/?next=%0d%0aX-Forged:%20yes"),
    ]
    for response in responses:
        assert "x-forged" not in response.headers
        assert all(value.isprintable() for value in response.headers.values())


def test_two_lengths_are_no_second_request(server: RunningServer) -> None:
    """What one side takes for a body, another could take for a request."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for lengths in (
        b"Content-Length: 0\r\nContent-Length: %d\r\n" % len(smuggled),
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Content-Length: +0\r\n",
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n%s\r\n" % lengths
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + smuggled)
            connection.shutdown(socket.SHUT_WR)
            reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert MODEL.encode() not in reply, lengths


def test_failures_do_not_show_the_inside(server: RunningServer) -> None:
    for response in (
        server.post("/v1/completions", {"prompt": {"a": 1}}),
        *(
            httpx.post(server.url + "/v1/completions", content=content, headers=JSON, timeout=30, verify=False)
            for content in (b"{" * 1000, b"\xff\xfe", b"[" * 100_000)
        ),
    ):
        assert response.status_code == 400
        assert "0x" not in response.text
        assert "Traceback" not in response.text
        assert ".py" not in response.text
