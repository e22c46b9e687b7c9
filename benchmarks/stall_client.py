"""Drives the stall load as its clients: for anything that streams tokens, over HTTP or in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from evenflow.bench.endpoints import Answer, Ask
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_run import StallRun, observe
from evenflow.errors import EndpointFailed

Generate = Callable[[Ask, Answer], Awaitable[None]]  # streams into the answer, as `Endpoint.stream` does
_POLL_S = 0.01


async def run_clients(generate: Generate, load: StallLoad) -> StallRun:
    """Run the load once, in real time."""
    async with running_chats(generate, load) as chats:
        began = time.perf_counter()

        async def send(ask: Ask) -> Answer:
            await asyncio.sleep(began + ask.at - time.perf_counter())
            answer = Answer()
            await _stream(generate, ask, answer)
            return answer

        asks = load.long_asks()
        answers = dict(zip(asks, await asyncio.gather(*map(send, asks.values())), strict=True))
        named = {f"chat-{number}": chat for number, chat in enumerate(chats, start=1)} | answers
    times = {name: [answer.sent_at + at for at in answer.piece_times_s] for name, answer in named.items()}
    run = observe(load, began, times, {name: answer.sent_at for name, answer in answers.items()})
    run.long_answers = [answer.text for answer in answers.values()]
    return run


@asynccontextmanager
async def running_chats(generate: Generate, load: StallLoad) -> AsyncIterator[list[Answer]]:
    """Keep the chats decoding. Enters once each has a token; the list grows as chats are replaced."""
    chats: list[Answer] = []

    async def keep_chatting() -> None:
        while True:
            chat, answer = load.chat(len(chats)), Answer()
            chats.append(answer)
            await _stream(generate, chat, answer)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(keep_chatting()) for _ in range(load.num_chats)]
            while len(chats) < load.num_chats or not all(chat.piece_times_s for chat in chats[: load.num_chats]):
                await asyncio.sleep(_POLL_S)
            yield chats
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures


async def _stream(generate: Generate, ask: Ask, answer: Answer) -> None:
    await generate(ask, answer)
    if answer.error is not None or not answer.piece_times_s:
        raise EndpointFailed(f"a request of the stall load failed: {answer.error or 'its answer is empty'}")
