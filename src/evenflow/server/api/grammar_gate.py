"""Checks the grammars that clients send before they reach the engine, where they can be stopped.

llguidance needs hours for some schemas of a few lines. A separate process reads the vocabulary and forks for each
grammar, and the fork is killed at its limit of processor time or memory. Nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import selectors
import signal
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest
from evenflow.framing import FrameReader, frame
from evenflow.host import limit_memory
from evenflow.model.text.grammar import Grammars
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.fair_slots import FairSlots
from evenflow.server.engine.helper_process import HelperProcess, Numbered, quiet_main, read_numbered
from evenflow.server.errors import overloaded

_AT_ONCE = 2
_MAX_WAITING = 64  # grammars of one client
_MAX_PROBLEM_CHARACTERS = 1000  # the library quotes grammars, and what is wrong with thousands is remembered
_MAX_KNOWN = 4096  # grammars whose result is remembered, good or bad
_MAX_CPU_S = 0.75  # somewhat more than `Grammars` allows, for what it does besides
_MAX_WALL_S = 20.0  # for a very busy machine
_MAX_BYTES = 512 << 20  # besides what the process has before
_NICENESS = 5
_RECEIVE_BYTES = 1 << 18
_UNDECIDED = b"\0"  # an answer that is no problem's text

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grammar).decode


class GrammarGate:
    """Use it on one event loop."""

    def __init__(self, vocabulary: Tokenizer, num_logits: int) -> None:
        self._helper = HelperProcess("evenflow-grammar-gate", _run, vocabulary, num_logits)
        self._slots = FairSlots(_AT_ONCE, 1, _MAX_WAITING, "their grammars to be checked")
        self._known: OrderedDict[bytes, str] = OrderedDict()  # what is wrong with a grammar, by digest; "": nothing
        self._pending: dict[tuple[bytes, str], asyncio.Task[str]] = {}  # by client: nobody waits in another's queue

    async def check(self, grammar: Grammar, client: str = "") -> None:
        """Raise InvalidRequest if a grammar cannot be used. Each is compiled once, whatever the result.

        A machine too busy to tell is no result: the request may be sent again.
        """
        digest = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        if (problem := self._known.get(digest)) is None:
            task = self._pending.get((digest, client))
            if task is None:
                task = self._pending[digest, client] = asyncio.create_task(self._compile(digest, grammar, client))
                task.add_done_callback(lambda done: self._forget(digest, client, done))
            problem = await asyncio.shield(task)  # others may wait for it too
        else:
            self._known.move_to_end(digest)
        if problem:
            raise InvalidRequest(problem)

    async def close(self) -> None:
        """Fail the checks that wait, and later ones of grammars that are not known."""
        await self._helper.close()

    def _forget(self, digest: bytes, client: str, done: asyncio.Task[str]) -> None:
        del self._pending[digest, client]
        if not done.cancelled():
            done.exception()  # seen, even if all who waited have left

    async def _compile(self, digest: bytes, grammar: Grammar, client: str) -> str:
        async with self._slots.slot(client):
            if (known := self._known.get(digest)) is not None:  # another client's turn came first
                return known
            answer = await self._helper.ask(_encode(grammar))
        if answer == _UNDECIDED:
            raise overloaded("This machine is too busy to check the request's grammar now.")
        problem = answer.decode()
        self._known[digest] = problem
        if len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return problem


def _run(connection: socket.socket, vocabulary: Tokenizer, num_logits: int) -> None:
    """The process. It must have no other thread: a fork has only the one that forks."""
    grammars = Grammars(vocabulary, num_logits)
    with contextlib.suppress(InvalidRequest):  # each check reports it
        grammars.read_vocabulary()
    os.nice(_NICENESS)
    quiet_main(_Forks(connection, grammars).run)


@dataclass(slots=True)
class _Fork:
    """A grammar that is being compiled."""

    number: int
    kind: str
    pid: int
    killed_at: float
    reply: bytes = b""


class _Forks:
    """Compiles each grammar in a fork and sends what is wrong with it, if anything."""

    def __init__(self, connection: socket.socket, grammars: Grammars) -> None:
        self._connection = connection
        self._grammars = grammars
        self._frames = FrameReader()
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._forks: dict[int, _Fork] = {}  # by the pipe that it replies on

    def run(self) -> None:
        """Until the front closes the connection."""
        while True:
            ends = [fork.killed_at for fork in self._forks.values()]
            timeout = max(0.0, min(ends) - time.monotonic()) if ends else None
            for key, _ in self._selector.select(timeout):
                if key.fileobj is self._connection:
                    self._take_questions()
                else:
                    self._read_reply(key.fd)
            for fork in self._forks.values():
                if time.monotonic() >= fork.killed_at:
                    os.kill(fork.pid, signal.SIGKILL)
                    fork.killed_at += _MAX_WALL_S

    def _take_questions(self) -> None:
        data = self._connection.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        for content in self._frames.feed(data):
            asked = read_numbered(content)
            self._fork(asked.number, _decode(asked.content))

    def _fork(self, number: int, grammar: Grammar) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            _compile_and_exit(self._grammars, grammar, writer, self._connection)
        os.close(writer)
        self._forks[reader] = _Fork(number, grammar.kind, pid, time.monotonic() + _MAX_WALL_S)
        self._selector.register(reader, selectors.EVENT_READ)

    def _read_reply(self, reader: int) -> None:
        fork = self._forks[reader]
        part = os.read(reader, _RECEIVE_BYTES)
        fork.reply += part
        if part:
            return
        self._selector.unregister(reader)
        os.close(reader)
        del self._forks[reader]
        _, status = os.waitpid(fork.pid, 0)
        answer = fork.reply if status == 0 else _why_killed(fork.kind, status)
        self._connection.sendall(frame(Numbered(fork.number, answer)))


def _compile_and_exit(grammars: Grammars, grammar: Grammar, writer: int, connection: socket.socket) -> None:
    """In the fork: write what is wrong with the grammar, or be killed at a limit. Never returns."""
    exit_code = 1
    try:
        connection.close()
        limit_memory(_MAX_BYTES)
        signal.setitimer(signal.ITIMER_PROF, _MAX_CPU_S)  # ends the process, even inside the library
        problem = ""
        try:
            grammars.check(grammar)
        except InvalidRequest as error:
            problem = str(error)
        os.write(writer, problem[:_MAX_PROBLEM_CHARACTERS].encode(errors="replace"))
        exit_code = 0
    finally:
        os._exit(exit_code)


def _why_killed(kind: str, status: int) -> bytes:
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if ended_by == signal.SIGKILL:  # at the limit of wall time, or for want of the machine's memory: others' doing
        return _UNDECIDED
    reason = "it takes too long to compile" if ended_by == signal.SIGPROF else "it takes too much memory to compile"
    return f"the {kind} cannot be used: {reason}".encode()
