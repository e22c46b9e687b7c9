"""Connections are accepted at once and opened in turn: behind a flood, another client waits for a few, not for all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial

import pytest

from evenflow.server import arrivals, held
from evenflow.server.access import ApiKeys, turn_of
from evenflow.server.arrivals import Arrivals
from evenflow.server.held import Held

REQUEST = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
WITH_KEY = REQUEST % (b"/v1/models", b"Authorization: Bearer a-key\r\n")


class Opened(asyncio.Protocol):
    """Notes who is opened, in order."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._ports.append(transport.get_extra_info("peername")[1])


def run(check: Callable[[socket.socket, Callable[[], Arrivals], list[int]], Awaitable[None]]) -> None:
    async def main() -> None:
        ports: list[int] = []
        with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
            owner_of = partial(turn_of, ApiKeys(["a-key", "another"]))
            await check(listener, lambda: Arrivals(listener, lambda: Opened(ports), Held(), owner_of), ports)

    asyncio.run(main())


def connect(listener: socket.socket, sent: bytes) -> socket.socket:
    connection = socket.create_connection(listener.getsockname(), timeout=30)
    connection.sendall(sent)
    return connection


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "sent", [WITH_KEY, WITH_KEY.replace(b"Authorization: Bearer", b"X-Api-Key:"), REQUEST % (b"/health?a", b"")]
)
def test_a_key_and_a_monitor_are_opened_before_the_flood(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_OPENED_PER_ROUND", 2)

    async def check(listener: socket.socket, arrive: Callable[[], Arrivals], ports: list[int]) -> None:
        flood = [connect(listener, REQUEST % (b"/", b"Authorization: Bearer made-up\r\n")) for _ in range(40)]
        with connect(listener, sent) as other:
            opening = arrive()
            await until(lambda: len(ports) == 41)
            assert ports.index(other.getsockname()[1]) <= 2
        for one in flood:
            one.close()
        opening.close()

    run(check)


def test_other_work_runs_between_a_few_that_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_OPENED_PER_ROUND", 2)

    async def check(listener: socket.socket, arrive: Callable[[], Arrivals], ports: list[int]) -> None:
        flood = [connect(listener, b"") for _ in range(40)]
        opening, found = arrive(), []
        while len(ports) < 40:
            before = len(ports)
            await asyncio.sleep(0)
            found.append(len(ports) - before)
        assert max(found) <= 2
        for one in flood:
            one.close()
        opening.close()

    run(check)


def test_those_that_wait_to_be_opened_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take descriptors: the oldest of whoever has the most are closed. A key's own stays."""
    monkeypatch.setattr(held, "MAX_WAITING", 10)
    monkeypatch.setattr(arrivals, "_OPENED_PER_ROUND", 0)

    async def check(listener: socket.socket, arrive: Callable[[], Arrivals], ports: list[int]) -> None:
        with connect(listener, WITH_KEY) as honest, ExitStack() as opened:
            flood = [opened.enter_context(connect(listener, b"GET / HT")) for _ in range(30)]
            opening = arrive()
            await until(lambda: opening._held._waiting.total == 10)
            for one in flood[:21]:
                assert has_ended(one)
            monkeypatch.setattr(arrivals, "_OPENED_PER_ROUND", 4)
            await until(lambda: len(ports) == 10)
            assert honest.getsockname()[1] in ports
            opening.close()

    run(check)


def test_a_server_that_closes_closes_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "_OPENED_PER_ROUND", 0)

    async def check(listener: socket.socket, arrive: Callable[[], Arrivals], ports: list[int]) -> None:
        with connect(listener, b"") as waiting:
            opening = arrive()
            await until(lambda: len(opening._lanes) == 1)
            opening.close()
            assert waiting.recv(1) == b""
            assert opening._held._waiting.total == 0
            assert not ports

    run(check)
