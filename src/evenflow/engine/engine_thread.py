"""A thread that an engine has to itself, for callers on any thread.

It exists for what a lock around the engine would not give. A handler of signals that raises, as Ctrl-C's does, runs on
the main thread: here it ends a caller's wait, and no step half way. And callers take turns in the order in which they
came.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

Value = TypeVar("Value")

_Call = tuple[Callable[[], Any], Callable[[tuple[Any, BaseException | None]], object]]
_Calls = SimpleQueue[_Call | None]


class EngineThread:
    """Carries out calls one at a time, in the order in which they were made. It ends with this object."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        threading.Thread(target=_run, args=(self._calls,), name="evenflow-engine", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, function: Callable[[], Value]) -> Value:
        """Its result, or its error. An exception while this waits does not stop it."""
        answer: SimpleQueue[tuple[Value, BaseException | None]] = SimpleQueue()
        self._calls.put((function, answer.put))
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def send(self, function: Callable[[], object]) -> None:
        """The same without waiting. May be called anywhere, also by the garbage collector."""
        self._calls.put((function, lambda answer: None))


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer((function(), None))
        except BaseException as error:  # the caller's, as everything that it asks for
            answer((None, error))
        del call, function, answer  # they refer to the model, which may be dropped while this waits
