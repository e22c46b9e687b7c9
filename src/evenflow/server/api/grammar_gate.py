"""Checks the grammars that clients send, before they reach the engine, in a process of its own.

Some schemas of a few lines take llguidance hours, and nothing can stop a thread: a process can be ended.
Must not know: HTTP, who asks.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import OrderedDict
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from evenflow.core.grammar import Grammar
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.model.grammar import Grammars, Vocabulary

_MOST_SECONDS = 5.0  # a thousand times what most take, for a busy machine
_MOST_START_SECONDS = 60.0  # for a new process, on a busy machine
_MOST_REMEMBERED = 256


class GrammarGate:
    """Starts its process with the first grammar, and another where one had to be ended."""

    def __init__(self, vocabulary: Vocabulary, num_logits: int) -> None:
        self._vocabulary = vocabulary
        self._num_logits = num_logits
        self._passed: OrderedDict[Grammar, None] = OrderedDict()
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._link: Connection | None = None

    def check(self, grammar: Grammar) -> None:
        """Say what is wrong with a grammar as an InvalidRequest. Any thread may ask; they are answered in turn."""
        with self._lock:
            if grammar not in self._passed:
                self._try_out(grammar)
            self._passed[grammar] = None
            self._passed.move_to_end(grammar)
            if len(self._passed) > _MOST_REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the process; a later check would start another."""
        with self._lock:
            self._end()

    def _try_out(self, grammar: Grammar) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._link is not None
        self._link.send(grammar)
        problem = self._answer(_MOST_SECONDS)
        if problem is None:
            problem = f"the {grammar.kind} cannot be used: it takes too long to compile"
        if problem:
            raise InvalidRequest(problem)

    def _start(self) -> None:
        self._end()
        context = multiprocessing.get_context("spawn")
        self._link, childs_end = context.Pipe()
        arguments = (childs_end, self._vocabulary, self._num_logits)
        self._process = context.Process(target=_serve, args=arguments, name="evenflow-grammar-gate", daemon=True)
        self._process.start()
        childs_end.close()
        if self._answer(_MOST_START_SECONDS) is None:
            raise EngineFailed("grammars cannot be checked: the process for it does not start")

    def _answer(self, seconds: float) -> str | None:
        """What the process says; None, and its end, where it says nothing."""
        assert self._link is not None
        try:
            if self._link.poll(seconds):
                answer = self._link.recv()
                assert isinstance(answer, str)
                return answer
        except EOFError:
            pass
        self._end()
        return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._link is not None:
            self._link.close()
        self._process = self._link = None


def _serve(link: Connection, vocabulary: Vocabulary, num_logits: int) -> None:
    """The process: answers each grammar with what is wrong with it, until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent decides
    grammars = Grammars(vocabulary, num_logits)
    problem = _problem(grammars, Grammar.regex("ready"))  # builds what all grammars share
    try:
        while True:
            link.send(problem)
            problem = _problem(grammars, link.recv())
    except (EOFError, OSError):
        return


def _problem(grammars: Grammars, grammar: Grammar) -> str:
    try:
        grammars.check(grammar)
    except InvalidRequest as error:
        return str(error)
    return ""
