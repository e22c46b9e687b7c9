"""What clients may do to a connection before a key is asked for: headers, URLs, pauses, half of a request."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress

import anyio.to_thread
import pytest
from starlette.types import ASGIApp

from evenflow.server import arrivals, connections, held, serving, turns
from evenflow.server.connections import BoundedProtocol
from evenflow.server.live import feed
from tests.server.engines import scoring_engine
from tests.server.serving import RunningServer, running_server, scripted_server

POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server(settings={"api_keys": ["a-key"]}) as running:
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


def is_refused(connection: socket.socket) -> bool:
    """Whether it has ended: with a 503 if it was opened."""
    with suppress(ConnectionResetError):
        return connection.recv(100).startswith(b"HTTP/1.1 503 ") or connection.recv(1) == b""
    return True


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
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    assert b"HTTP/1.1 431 " in send(server, head, b"X: y\r\n" * 20_000, b"\r\n")


def test_a_body_of_tiny_chunks_is_refused_and_one_of_small_chunks_is_not(server: RunningServer) -> None:
    """Before, chunks of a byte took 40 ms of the event loop for each 256 kB, without a key and without an end."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-key\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert b"HTTP/1.1 400 " in send(server, head, b"1\r\n \r\n" * 20_000)
    padded = b'{"prompt": "a", "max_tokens": 1}' + b" " * 640_000
    chunks = b"".join(b"20\r\n%s\r\n" % padded[first : first + 32] for first in range(0, len(padded), 32))
    assert send(server, head, chunks, b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_errors_of_the_connection_have_the_shape_of_all_others(server: RunningServer) -> None:
    head, _, body = send(server, b"GET /%s HTTP/1.1\r\n\r\n" % (b"a" * 20_000)).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    assert b'"error":{"message":"Got a URL of' in body


def test_unfinished_requests_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, they stayed open for ever."""
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connections, "GRACE_S", 0.2)
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
    monkeypatch.setattr(held, "MAX_WAITING", 20)
    with scripted_server() as server:
        opened = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(60)]
        for connection in opened:
            connection.sendall(b"GET /health HTTP/1.1\r\nHos")
        assert server.get("/health").status_code == 200
        server.until(lambda: len(server.server.server_state.connections) <= 21)
        assert is_refused(opened[0]), "the oldest went first"
        for connection in opened:
            connection.close()


def test_those_that_wait_for_their_turn_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_WAITING", 20)
    monkeypatch.setattr(turns, "_STARTS_PER_ROUND", 0)  # none starts
    made = []

    class KnownTurns(turns.Turns):
        def __init__(self, app: ASGIApp) -> None:
            super().__init__(app)
            made.append(self)

    monkeypatch.setattr(serving, "Turns", KnownTurns)
    request = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with scripted_server() as server:
        opened = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(30)]
        for connection in opened:
            connection.sendall(request * 3)
        for connection in opened[:10]:
            assert is_refused(connection), "the oldest go first"
        server.until(lambda: len(server.server.server_state.connections) <= 20)
        loop = next(iter(server.server.server_state.connections)).loop
        for connection in opened:
            connection.close()
        monkeypatch.setattr(turns, "_STARTS_PER_ROUND", 4)
        loop.call_soon_threadsafe(made[0]._next_round)
        server.until(lambda: not server.server.server_state.tasks)


def test_no_request_begins_on_a_thread(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a thread and back took up to a second and a half where others kept the front busy."""
    assert server.get("/openapi.json").status_code == 200  # made on a thread, once

    def fail(*args: object, **options: object) -> None:
        raise AssertionError("a thread was asked for")

    monkeypatch.setattr(anyio.to_thread, "run_sync", fail)
    key = {"authorization": "Bearer a-key"}
    for path in ("/health", "/ready", "/version", "/openapi.json", "/", "/live/main.js", "/v1/models", "/metrics"):
        assert server.get(path, headers=key).status_code == 200, path
    assert server.get("/v1/models").status_code == 401


def test_a_long_pipeline_is_parsed_request_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = []
    begin = BoundedProtocol.on_message_begin

    def count(self: BoundedProtocol) -> None:
        begin(self)
        depths.append(len(self.pipeline))

    monkeypatch.setattr(BoundedProtocol, "on_message_begin", count)
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = POST % 15 + b'{"prompt": "a"}'
    last = request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with scripted_server() as server:
        replies = send(server, request * 300 + post + request * 3 + last)
        assert replies.count(b"HTTP/1.1 200 ") == 305
        assert max(depths[:300]) <= 1


def test_a_long_pipeline_behind_a_body_is_cut(server: RunningServer) -> None:
    """What arrives with the end of a body is parsed at once."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    post = POST % 15 + b'{"prompt": "a"}'
    replies = send(server, post + request * 5_000)
    assert replies.count(b"HTTP/1.1 ") < 5_000


def test_a_server_without_files_accepts_again_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arrivals, "_NO_FILES_PAUSE_S", 0.01)
    with scripted_server() as server:
        accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

        def fail_first(listener: socket.socket) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", fail_first)
        assert server.get("/health").status_code == 200
    assert not failures
    assert "Cannot accept connections: Too many open files." in caplog.text


def test_the_usual_limit_of_open_files_is_raised() -> None:
    """In a process of its own: the limit stays."""
    code = (
        "import resource; from evenflow.server.held import raise_file_limit;"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512));"
        "print(raise_file_limit(300), raise_file_limit(200), raise_file_limit(4096),"
        "      resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "300 300 512 (512, 512)\n"


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


def connect(server: RunningServer) -> socket.socket:
    """With little room for what is not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    return connection


GET_SCHEMA = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = b'{"prompt": "a", "max_tokens": 900, "n": 8, "logprobs": 20, "ignore_eos": true, "stream": %s}'


@pytest.mark.slow
def test_who_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, such connections took all descriptors without a key, and streams held the queue, for ever."""
    monkeypatch.setattr(connections, "GRACE_S", 0.3)
    with running_server(scoring_engine) as server:
        bodies = [STREAM % kind for kind in (b"true", b"false")]
        requests = [GET_SCHEMA * 16, *(POST % len(body) + body for body in bodies)]
        held_open = [connect(server) for _ in requests]
        for connection, request in zip(held_open, requests, strict=True):
            connection.sendall(request)
        server.until(lambda: server.server.service.gate.num_inside == 16)
        server.until(lambda: not server.server.server_state.connections)
        server.until(lambda: server.server.service.gate.num_inside == 0)
        assert server.get("/health").status_code == 200
        for connection in held_open:
            connection.close()


@pytest.mark.slow
def test_who_does_not_read_a_feed_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.3)
    monkeypatch.setattr(feed, "BATCH_S", 0.001)
    with scripted_server() as server, connect(server) as connection:
        connection.sendall(b"GET /live/feed HTTP/1.1\r\nHost: localhost\r\n\r\n")
        server.until(lambda: server.server.num_pages == 1)
        server.until(lambda: server.server.num_pages == 0)


def test_the_system_holds_little_for_who_reads_nothing() -> None:
    """Before, it took megabytes of responses for each such connection, and the server wrote them."""
    with scripted_server() as server, connect(server) as connection:
        connection.sendall(GET_SCHEMA * 16)
        server.until(lambda: any(one.flow.write_paused for one in server.server.server_state.connections))
        [one] = server.server.server_state.connections
        assert one.transport.num_bytes - one.transport.num_unread < 1 << 19


def test_a_whole_response_counts_until_it_is_read() -> None:
    """Before, it left the gate when it was handed to the connection."""
    body = STREAM % b"false"
    with running_server(scoring_engine, limits={"max_tenant_requests": 8}) as server:
        with connect(server) as connection:
            connection.sendall(POST % len(body) + body)
            server.until(lambda: server.client.num_open == 8)
            server.until(lambda: server.client.num_open == 0)
            for _ in range(3):
                assert server.post("/v1/completions", {"prompt": "a"}).status_code == 429
            connection.settimeout(30)
            size = 0
            while not (data := connection.recv(1 << 16)).endswith(b"0\r\n\r\n"):
                size += len(data)
        server.until(lambda: server.server.service.gate.num_inside == 0)
        assert size > 1 << 20


def test_new_clients_are_served_while_others_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_WAITING", 20)
    with scripted_server() as server:
        held_open = [connect(server) for _ in range(60)]
        for connection in held_open:
            connection.sendall(GET_SCHEMA * 16)
        server.until(lambda: len(server.server.server_state.connections) <= 21)
        assert server.get("/health").status_code == 200
        for connection in held_open:
            connection.close()


def test_a_slow_body_must_be_the_faster_the_larger_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GRACE_S", 0.2)
    monkeypatch.setattr(connections, "MIN_BYTES", 1)
    with scripted_server() as server, connect(server) as connection:
        connection.settimeout(30)
        connection.sendall(POST % 8_000_000 + b'{"prompt": "')
        connection.sendall(b"a" * 100_000)
        server.until(lambda: any(one._request_bytes for one in server.server.server_state.connections))
        connection.setblocking(False)
        reply = b""
        while not reply:
            try:
                reply = connection.recv(1000)
            except BlockingIOError:
                with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    connection.send(b"a")
                time.sleep(0.05)
        assert reply.startswith(b"HTTP/1.1 408 ")


def test_slow_bodies_of_some_keys_delay_no_other_key() -> None:
    """Before, two keys with two bodies each blocked all large bodies, for hours."""
    keys = ["first", "second", "third"]
    with scripted_server(settings={"api_keys": keys}) as server:
        slow = []
        for key in ("first", "second"):
            for _ in range(3):
                head = (POST % 8_000_000).replace(b"Host:", b"Authorization: Bearer %s\r\nHost:" % key.encode())
                slow.append(connect(server))
                slow[-1].sendall(head + b'{"prompt": "' + b"a" * 17_000)
        bodies = server.server.service.large_work._bodies
        server.until(lambda: sum(bodies._running.values()) == 4)
        body = {"prompt": "a", "max_tokens": 1, "user": "b" * 70_000}
        response = server.post("/v1/completions", body, headers={"Authorization": "Bearer third"})
        assert response.status_code == 200
        for connection in slow:
            connection.close()


class Client:
    def __init__(self, owner: str, lost: list[object]) -> None:
        self.owner = owner
        self._lost = lost

    def lose(self, reason: str) -> None:
        self._lost.append(self)


def test_who_holds_most_loses_its_largest_or_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_WAITING", 4)
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 100)
    lost: list[object] = []
    flood, (honest,) = [Client("many", lost) for _ in range(6)], [Client("one", lost)]
    server = held.Held()
    server.wait(honest)
    for one in flood:
        server.wait(one)
    assert lost == flood[:3]
    lost.clear()
    server.hold(honest, 40)
    for one, size in zip(flood, (10, 30, 15, 5, 10), strict=False):
        server.hold(one, size)
    assert lost == [flood[1]]
    server.hold(honest, 60)
    assert lost == [flood[1]]
    server.discard(honest)
    server.hold(flood[0], 70)
    assert lost == [flood[1]]


class CountedName(str):
    num_compared = 0

    def __eq__(self, other: object) -> bool:
        CountedName.num_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_a_body_is_its_keys_before_the_key_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it counted for the address until the request began: without a key, others there had it refused."""
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 600_000)
    with scripted_server(settings={"api_keys": ["a-key"]}) as server:
        of_all = server.server.config.http_protocol_class.held
        opened = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(12)]
        for connection in opened:
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"y" * 30_000)
        server.until(lambda: of_all._bytes.total > 12 * 46_000)
        body = {"prompt": "a", "max_tokens": 1, "user": "b" * 70_000}
        assert server.post("/v1/completions", body, headers={"authorization": "Bearer a-key"}).status_code == 200
        for connection in opened:
            connection.close()


def test_a_connection_counts_for_its_key_as_soon_as_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, one that waited for its turn still counted for its address, whose oldest are lost in a flood."""
    monkeypatch.setattr(held, "MAX_WAITING", 3)
    lost: list[object] = []
    server, honest, flood = held.Held(), Client("address", lost), [Client("address", lost) for _ in range(5)]
    server.wait(honest)
    honest.owner = "key"
    server.know(honest)
    for one in flood:
        server.wait(one)
    assert lost == flood[:3]
    server.go_on(honest)
    server.know(honest)
    server.wait(flood[0])
    assert lost == flood[:3], "one that does not wait is not counted"


def test_the_largest_is_found_without_a_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 4,000 connections of a flood over the bound took 15 s of the event loop."""
    monkeypatch.setattr(held, "MAX_HELD_BYTES", 500_000)
    server, lost = held.Held(), list[object]()
    for number in range(500):
        server.hold(Client(CountedName("the same"), lost), 900 + number % 7)
    large = Client(CountedName("the same"), lost)
    CountedName.num_compared = 0
    server.hold(large, 50_000)
    for _ in range(100):
        server.hold(Client(CountedName("the same"), lost), 10_000)
    assert lost[0] is large
    assert len(lost) > 50
    assert CountedName.num_compared < 2000


def test_a_connection_too_many_costs_no_look_at_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each took a millisecond of the event loop where 4,096 waited: a flood of them stopped all requests."""
    monkeypatch.setattr(held, "MAX_WAITING", 500)
    server, lost = held.Held(), list[object]()
    for _ in range(500):
        server.wait(Client("the same", lost))
    CountedName.num_compared = 0
    for _ in range(100):
        server.wait(Client(CountedName("the same"), lost))
    assert len(lost) == 100
    assert CountedName.num_compared < 1000


def test_lost_connections_are_freed_without_a_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, what a flood had left was kept until a full one: 600 MB."""
    made: list[weakref.ref[BoundedProtocol]] = []
    begin = BoundedProtocol.connection_made

    def note(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        begin(self, transport)
        made.append(weakref.ref(self))

    monkeypatch.setattr(BoundedProtocol, "connection_made", note)
    with scripted_server() as server:
        gc.collect()
        gc.disable()
        try:
            for sent in (b"", b"GET /hea", GET_SCHEMA, GET_SCHEMA * 16, POST % 15 + b'{"prompt": "a"}' + GET_SCHEMA):
                with connect(server) as connection:
                    connection.sendall(sent)
                    server.until(lambda: bool(server.server.server_state.connections))
            server.until(lambda: not server.server.server_state.tasks)
            server.until(lambda: len(made) == 5 and not any(one() for one in made))
        finally:
            gc.enable()


def test_requests_whose_client_left_wait_for_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a flood of clients that left stayed until each one's turn came."""
    monkeypatch.setattr(turns, "_STARTS_PER_ROUND", 0)  # none starts
    with scripted_server() as server:
        with connect(server) as connection:
            connection.sendall(GET_SCHEMA)
            server.until(lambda: bool(server.server.server_state.tasks))
        server.until(lambda: not server.server.server_state.tasks)


def test_memory_is_returned_after_a_burst_of_connections_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, only after requests that reach the engine."""
    monkeypatch.setattr(serving, "_FEW_CONNECTIONS", 3)
    returned = []
    monkeypatch.setattr(serving, "return_freed_memory", lambda: returned.append(True))
    with scripted_server() as server:
        server.until(lambda: bool(returned))
        opened = [connect(server) for _ in range(5)]
        server.until(lambda: server.server._work == (False, True))
        returned.clear()
        for connection in opened:
            connection.close()
        server.until(lambda: bool(returned))


def test_what_clients_do_without_a_key_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Before, a traceback for each client that closed without reading, and two lines for each upgrade."""
    upgrade = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with scripted_server() as server:
        logging.getLogger("uvicorn.error").addHandler(caplog.handler)
        assert b"HTTP/1.1 200 " in send(server, upgrade, half_close=True)
        assert b"HTTP/1.1 400 " in send(server, b"nonsense\r\n\r\n")
        for _ in range(5):
            connection = connect(server)
            connection.sendall(GET_SCHEMA * 16)
            server.until(lambda: any(one.flow.write_paused for one in server.server.server_state.connections))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            server.until(lambda: not server.server.server_state.connections)
        server.until(lambda: not server.server.server_state.tasks)
    logging.getLogger("uvicorn.error").removeHandler(caplog.handler)
    assert not caplog.messages
