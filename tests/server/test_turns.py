"""A burst of requests of one client starts a few at a time, and others start between them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from evenflow.server import turns
from evenflow.server.access import ApiKeys, turn_of
from evenflow.server.turns import Turns


class Connection(SimpleNamespace):
    has_left = False
    num_starts = 0

    def start(self) -> None:
        self.num_starts += 1


def scope(client: str, path: str = "/", **headers: str) -> dict[str, Any]:
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {
        "type": "http",
        "path": path,
        "headers": named,
        "client": (client, 1),
        "state": {"connection": Connection(owner=client)},
    }


class Started:
    """An app that notes what it starts."""

    def __init__(self) -> None:
        self.clients: list[str] = []
        self.sent: list[Message] = []
        self.turns = Turns(self._app)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.clients.append(scope["client"][0])

    def ask(self, asked: dict[str, Any]) -> asyncio.Task[None]:
        async def send(message: Message) -> None:
            self.sent.append(message)

        async def run() -> None:
            await self.turns(asked, None, send)  # type: ignore[arg-type]

        return asyncio.create_task(run())


def test_a_burst_delays_no_other_client() -> None:
    async def run() -> list[str]:
        started = Started()
        flood = [started.ask(scope("flood")) for _ in range(100)]
        await asyncio.sleep(0)
        other = started.ask(scope("other"))
        await asyncio.gather(*flood, other)
        return started.clients

    clients = asyncio.run(run())
    assert len(clients) == 101
    assert clients.index("other") <= 3 * turns._STARTS_PER_ROUND


def test_other_work_runs_between_the_starts_of_a_burst() -> None:
    async def run() -> list[int]:
        started = Started()
        flood = [started.ask(scope("flood")) for _ in range(40)]
        found = []
        while len(started.clients) < 40:
            before = len(started.clients)
            await asyncio.sleep(0)
            found.append(len(started.clients) - before)
        await asyncio.gather(*flood)
        return found

    assert max(asyncio.run(run())) <= turns._STARTS_PER_ROUND


def test_however_many_wait_all_get_their_turn_and_none_a_refusal() -> None:
    """A refusal takes as long as a start, and was not counted as one: 800 of them delayed each round by 0.4 s."""

    async def run() -> tuple[Started, int]:
        started = Started()
        asked = [scope("flood") for _ in range(1000)]
        tasks = [started.ask(one) for one in asked]
        await asyncio.sleep(0)
        num_begun = sum(one["state"]["connection"].num_starts for one in asked)
        await asyncio.gather(*tasks)
        assert all(one["state"]["connection"].num_starts == 1 for one in asked)
        return started, num_begun

    started, num_begun = asyncio.run(run())
    assert len(started.clients) == 1000
    assert started.sent == []
    assert num_begun <= turns._STARTS_PER_ROUND, "who waits for a turn has not begun"


def test_requests_that_end_while_they_wait_are_not_started() -> None:
    async def run() -> tuple[list[str], int]:
        started = Started()
        asked = [scope(str(number)) for number in range(20)]
        tasks = [started.ask(one) for one in asked]
        await asyncio.sleep(0)
        tasks[10].cancel()
        asked[11]["state"]["connection"].has_left = True
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        return started.clients, len(started.turns._lanes)

    clients, num_lanes = asyncio.run(run())
    assert sorted(map(int, clients)) == [number for number in range(20) if number not in (10, 11)]
    assert num_lanes == 0


def test_a_key_that_is_made_up_shares_the_turn_of_its_address() -> None:
    keys = ApiKeys(["one", "two"])
    lanes = {
        turn_of(keys, scope("10.0.0.1", authorization=f"Bearer {key}")) for key in ("made up", "again", "one", "two")
    }
    assert len(lanes) == 3
    assert turn_of(keys, scope("10.0.0.1")) == turn_of(keys, scope("10.0.0.1", authorization="Bearer made up"))
    assert turn_of(keys, scope("10.0.0.1", "/health")) not in lanes
