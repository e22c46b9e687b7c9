"""A few slots for slow work: each client gets its turn, and only requests that still wait count."""

from __future__ import annotations

import asyncio

import pytest

from evenflow.server.api.fair_slots import FairSlots
from evenflow.server.errors import ApiError


async def hold(slots: FairSlots, client: str, ended: list[str]) -> None:
    async with slots.slot(client):
        await asyncio.sleep(0)
    ended.append(client)


def test_requests_that_left_are_not_counted_nor_kept() -> None:
    async def main() -> None:
        slots, ended = FairSlots(1, 1, 2, "their turn"), list[str]()
        async with slots.slot("first"):
            for _ in range(1000):
                left = asyncio.create_task(hold(slots, "a", ended))
                await asyncio.sleep(0)
                left.cancel()
                await asyncio.wait([left])
            assert slots._waiting == {}
            waiting = [asyncio.create_task(hold(slots, client, ended)) for client in "aab"]
            await asyncio.sleep(0)
            with pytest.raises(ApiError, match="2 of your requests wait for their turn already"):
                await hold(slots, "a", ended)
            waiting[0].cancel()  # its place is free once it has left, and the others keep theirs
        await asyncio.wait(waiting)
        assert ended == ["a", "b"]
        await hold(slots, "a", ended)
        assert not slots._running

    asyncio.run(main())


def test_clients_take_turns() -> None:
    async def main() -> None:
        slots, ended = FairSlots(1, 1, 10, "their turn"), list[str]()
        async with slots.slot("first"):
            waiting = [asyncio.create_task(hold(slots, client, ended)) for client in "aaab"]
            await asyncio.sleep(0)
        await asyncio.wait(waiting)
        assert ended == ["a", "b", "a", "a"]

    asyncio.run(main())
