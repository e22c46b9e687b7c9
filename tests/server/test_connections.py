"""What clients may do to a connection before a key is asked for: headers, URLs, pauses, half of a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from evenflow.server import connections
from tests.server.serving import RunningServer, scripted_server

POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(settings={"api_keys": ["a key"]}) as running:
        yield running


def send(server: RunningServer, *parts: bytes, half_close: bool = False) -> bytes:
    """What comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, ConnectionResetError):
            pass  # refused before all of it was sent
        received = b""
        try:
            while data := connection.recv(1 << 16):
                received += data
        except ConnectionResetError:
            pass
        return received


def test_headers_are_bounded_before_a_key_is_asked_for(server: RunningServer) -> None:
    """Before, 60 MB of them were taken: 567 MB of memory."""
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    assert send(server, head, b"X: %s\r\n\r\n" % (b"a" * 100_000)).startswith(b"HTTP/1.1 431 ")
    assert send(server, head, b"X: y\r\n" * 5_000, b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert send(server, head, *[b"X%d: y\r\n" % number for number in range(200)], b"\r\n").startswith(b"HTTP/1.1 431 ")
    assert send(server, head, b"X" * 1_000_000).startswith(b"HTTP/1.1 431 ")
    reply = send(server, head, b"X: %s\r\nConnection: close\r\n\r\n" % (b"a" * 30_000))
    assert reply.startswith(b"HTTP/1.1 401 ")


def test_urls_are_bounded(server: RunningServer) -> None:
    for size, status in ((60_000, b"414"), (9_000, b"414"), (4_000, b"404")):
        request = b"GET /%s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % (b"a" * size)
        assert send(server, request).startswith(b"HTTP/1.1 %s " % status)
    assert send(server, b"GET /%s" % (b"a" * 100_000)).startswith(b"HTTP/1.1 414 ")


def test_trailers_are_bounded(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a key\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert b"HTTP/1.1 431 " in send(server, head, b"X: y\r\n" * 20_000, b"\r\n")


def test_errors_of_the_connection_have_the_shape_of_all_others(server: RunningServer) -> None:
    head, _, body = send(server, b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 20_000)).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    assert b'"error":{"message":"Got a URL of' in body


def test_unfinished_requests_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they stayed open for ever."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections, "BODY_GRACE_S", 0.2)
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with scripted_server() as server:
        assert send(server, b"GET /health HTTP/1.1\r\nHos").startswith(b"HTTP/1.1 408 ")
        assert send(server).startswith(b"HTTP/1.1 408 ")
        assert send(server, post + b'Content-Length: 500\r\n\r\n{"prompt":').startswith(b"HTTP/1.1 408 ")
        assert send(server, post + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{").startswith(b"HTTP/1.1 408 ")
        # A second request on a connection, too.
        first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert b"HTTP/1.1 408 " in send(server, first, b"GET /health HTTP/1.1\r\nHos")
        server.until(lambda: not server.server.server_state.tasks)
        assert server.get("/health").status_code == 200
        # A response may take as long as it likes.
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 500}).status_code == 200


def test_new_clients_are_served_while_others_hold_unfinished_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNFINISHED", 20)
    with scripted_server() as server:
        held = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(60)]
        for connection in held:
            connection.sendall(b"GET /health HTTP/1.1\r\nHos")
        assert server.get("/health").status_code == 200
        server.until(lambda: len(server.server.server_state.connections) <= 21)
        assert held[0].recv(100).startswith(b"HTTP/1.1 408 "), "the oldest went first"
        for connection in held:
            connection.close()


def test_a_long_pipeline_is_cut(server: RunningServer) -> None:
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    replies = send(server, request * 20 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert replies.count(b"HTTP/1.1 200 ") == 21
    replies = send(server, request * 5_000)
    assert replies.count(b"HTTP/1.1 ") < 5_000


def test_a_client_that_only_stops_sending_gets_its_answer() -> None:
    """Before, its request was dropped."""
    body = b'{"prompt": "a", "max_tokens": 20%s}'
    with scripted_server(step_s=0.02) as server:
        for extra in (b"", b', "stream": true'):
            content = body % extra
            reply = send(server, POST % len(content) + content, half_close=True)
            assert b"HTTP/1.1 200 " in reply
            assert reply.endswith((b"0\r\n\r\n", b"}"))
        server.until(lambda: not server.server.server_state.connections)


def test_a_client_that_closes_before_the_answer_drops_its_request() -> None:
    content = b'{"prompt": "a", "max_tokens": 900}'
    with scripted_server(step_s=0.05) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(POST % len(content) + content)
            server.until(lambda: server.client.num_open == 1)
        server.until(lambda: server.client.num_open == 0, seconds=15)
