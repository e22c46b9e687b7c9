"""Drives a load as its clients, in real time: for anything that streams tokens, over HTTP or in this process."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from named_loads import NamedLoad
from outcomes import Stream
from random_loads import Client
from stall_client import Generate

from evenflow.bench.endpoints import Answer, Ask
from evenflow.errors import EndpointFailed


class LoadRun:
    """One load, once. Every prompt has tokens of its own, so that no prefix cache holds it."""

    def __init__(self, generate: Generate, load: NamedLoad, vocab_size: int) -> None:
        self._generate, self._load = generate, load
        drawn = random.Random(time.time_ns())
        longest = max(turn.prompt_tokens for client in self._clients() for turn in client.turns)
        self._tokens = drawn.choices(range(100, vocab_size - 100), k=longest + 1_000_003)
        self.began = self.seconds = 0.0
        self._answers: list[tuple[Stream, Answer]] = []

    async def run(self) -> list[Stream]:
        """Every request that was sent, with the times of its tokens in seconds since the run began."""
        self.began = time.perf_counter()
        try:
            async with asyncio.timeout(self._load.load.seconds), asyncio.TaskGroup() as group:
                chats, prompts = (
                    [group.create_task(self._serve(client)) for client in clients]
                    for clients in (self._load.load.chats, self._load.load.long_prompts)
                )
                await (asyncio.wait(prompts) if self._load.ends_with_answers else asyncio.sleep(math.inf))
                for chat in chats:
                    chat.cancel()
        except TimeoutError:
            pass
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        self.seconds = time.perf_counter() - self.began
        for stream, answer in self._answers:
            sent = answer.sent_at - self.began
            stream.token_times = [sent + at for at in answer.piece_times_s]
        return [stream for stream, _ in self._answers]

    def _clients(self) -> tuple[Client, ...]:
        return (*self._load.load.chats, *self._load.load.long_prompts)

    async def _serve(self, client: Client) -> None:
        await asyncio.sleep(client.start_s)
        for turn in itertools.count() if client.repeats else range(len(client.turns)):
            size = client.turns[turn % len(client.turns)]
            number = len(self._answers)
            due = time.perf_counter() - self.began if turn else client.start_s
            first = number * 7919 % 1_000_003
            ask = Ask(self._tokens[first : first + size.prompt_tokens], size.output_tokens)
            stream = Stream(f"r{number}", client, turn, due, not client.repeats, size.prompt_tokens, size.output_tokens)
            answer = Answer()
            self._answers.append((stream, answer))
            await self._generate(ask, answer)
            if answer.error is not None or not answer.piece_times_s:
                raise EndpointFailed(f"a request of load {self._load.name} failed: {answer.error or 'empty answer'}")
            await asyncio.sleep(client.pause_s)
