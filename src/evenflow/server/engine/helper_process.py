"""A process beside the front for work on untrusted input that may take too long or too much memory.

It answers numbered questions. A thread could not be stopped; a process can be killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import socket
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from typing import Any

import msgspec

from evenflow.errors import EngineFailed
from evenflow.host import start_shielded
from evenflow.server.engine.link import Link

_ANSWER_TIMEOUT_S = 60.0  # for its start and a queue: each helper bounds its own work far below this


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """A question, or the answer of the same number."""

    number: int
    content: bytes


read_numbered = msgspec.msgpack.Decoder(Numbered).decode


class HelperProcess:
    """Starts with the first question, and again after its death, until it is closed.

    `main` gets the socket, then `arguments`.
    """

    def __init__(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        self._name = name
        self._main = main
        self._arguments = arguments
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._starting = asyncio.Lock()
        self._link: Link | None = None
        self._process: SpawnProcess | None = None
        self.is_closed = False

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return None if self._process is None else self._process.pid

    async def ask(self, question: bytes) -> bytes:
        """Its answer; EngineFailed if the process dies first."""
        if self.is_closed:
            raise EngineFailed("the server is shutting down")
        link = await self._connected()
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        link.send(Numbered(number, question))
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            await self._kill()
            raise EngineFailed(f"the process {self._name} does not respond") from None
        finally:
            self._answers.pop(number, None)

    async def start(self) -> None:
        """Ahead of the first question."""
        await self._connected()

    async def close(self) -> None:
        """Kill the process: open questions fail, and later ones too."""
        self.is_closed = True
        await self._kill()

    async def _kill(self) -> None:
        if self._process is not None and self._process.pid is not None:  # else its start was cancelled
            self._process.kill()
        if self._link is not None:
            self._link.close()
            await asyncio.wait([self._link.lost])
            await self._end()

    async def _connected(self) -> Link:
        async with self._starting:
            if self._link is not None and self._link.lost.done():
                await self._end()
            if self._link is None:
                self._link = await self._start()
            return self._link

    async def _start(self) -> Link:
        ours, theirs = socket.socketpair()
        with theirs:
            context = multiprocessing.get_context("spawn")
            arguments = (theirs, *self._arguments)
            self._process = context.Process(target=self._main, args=arguments, name=self._name, daemon=True)
            try:
                await asyncio.to_thread(start_shielded, self._process)
            except BaseException:  # cancelled, too: the process then ends for want of the socket
                ours.close()
                raise
        link = Link(self._on_answer)
        await link.connect(ours)
        link.lost.add_done_callback(lambda lost: self._fail_all())
        return link

    async def _end(self) -> None:
        """Clean up after a process that has closed its socket."""
        process, self._process, self._link = self._process, None, None
        if process is not None:
            process.kill()
            await asyncio.to_thread(process.join)

    def _on_answer(self, content: bytes) -> None:
        answered = read_numbered(content)
        answer = self._answers.get(answered.number)
        if answer is not None and not answer.done():
            answer.set_result(answered.content)

    def _fail_all(self) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineFailed(f"the process {self._name} died"))


def quiet_main(main: Callable[[], None]) -> None:
    """Run a helper's loop until the front closes the socket."""
    with contextlib.suppress(EOFError, OSError):
        main()
