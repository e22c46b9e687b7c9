"""Checks the grammars that clients send before they reach the engine, in a separate process.

llguidance needs hours for some schemas of a few lines. A thread cannot be stopped; a process can be killed.
"""

from __future__ import annotations

import multiprocessing
import threading
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from evenflow.core.grammar import Grammar
from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.host import start_without_interrupts
from evenflow.model.grammar import Grammars
from evenflow.model.tokenizer import Tokenizer

_CHECK_TIMEOUT_S = 5.0  # a thousand times what most grammars take, for a busy machine
_START_TIMEOUT_S = 60.0
_CACHE_SIZE = 256


class GrammarGate:
    """Starts its process with the first grammar, and a new one after a timeout."""

    def __init__(self, vocabulary: Tokenizer, num_logits: int) -> None:
        self._vocabulary = vocabulary
        self._num_logits = num_logits
        self._compile_once = lru_cache(_CACHE_SIZE)(self._compile)  # errors are not cached
        self._lock = threading.Lock()
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None

    def check(self, grammar: Grammar) -> None:
        """Raise InvalidRequest if a grammar cannot be used. Thread-safe; grammars are checked one at a time."""
        with self._lock:
            self._compile_once(grammar)

    def close(self) -> None:
        """Kill the process; a later check starts another."""
        with self._lock:
            self._kill()

    def _compile(self, grammar: Grammar) -> None:
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._connection is not None
        self._connection.send(grammar)
        problem = self._receive(_CHECK_TIMEOUT_S)
        if problem is None:
            problem = f"the {grammar.kind} cannot be used: it takes too long to compile"
        if problem:
            raise InvalidRequest(problem)

    def _start(self) -> None:
        self._kill()
        context = multiprocessing.get_context("spawn")
        self._connection, child_connection = context.Pipe()
        arguments = (child_connection, self._vocabulary, self._num_logits)
        self._process = context.Process(target=_run, args=arguments, name="evenflow-grammar-gate", daemon=True)
        start_without_interrupts(self._process)
        child_connection.close()
        if self._receive(_START_TIMEOUT_S) is None:
            raise EngineFailed("grammars cannot be checked: the process for it does not start")

    def _receive(self, timeout_s: float) -> str | None:
        """The process's reply; on a timeout the process is killed and the reply is None."""
        assert self._connection is not None
        try:
            if self._connection.poll(timeout_s):
                return str(self._connection.recv())
        except EOFError:
            pass
        self._kill()
        return None

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process.close()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None


def _run(connection: Connection, vocabulary: Tokenizer, num_logits: int) -> None:
    """The process: replies to each grammar with what is wrong with it, until the server closes the connection."""
    grammars = Grammars(vocabulary, num_logits)
    problem = _problem(grammars, Grammar.regex("ready"))  # builds what all grammars share
    try:
        while True:
            connection.send(problem)
            problem = _problem(grammars, connection.recv())
    except (EOFError, OSError):
        return


def _problem(grammars: Grammars, grammar: Grammar) -> str:
    try:
        grammars.check(grammar)
    except InvalidRequest as error:
        return str(error)
    return ""
