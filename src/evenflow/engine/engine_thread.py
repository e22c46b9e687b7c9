"""The engine's own thread, for callers on any thread.

A lock around the engine would not do. A signal handler that raises, as for Ctrl-C, runs on the main thread: here it
interrupts a caller's wait, never a step. And callers are served in order of arrival.
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
    """Carries out calls one at a time, in order. The thread ends with this object, or when the interpreter exits."""

    def __init__(self) -> None:
        self._calls: _Calls = SimpleQueue()
        thread = threading.Thread(target=_run, args=(self._calls,), name="evenflow-engine", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._calls, thread)

    def call(self, function: Callable[[], Value]) -> Value:
        """Run a function and return its result or raise its error. An exception during the wait does not stop it."""
        answer: SimpleQueue[tuple[Value, BaseException | None]] = SimpleQueue()
        self._calls.put((function, answer.put))
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def send(self, function: Callable[[], object]) -> None:
        """The same without waiting. Callable from anywhere, also from the garbage collector."""
        self._calls.put((function, lambda answer: None))


def _end(calls: _Calls, thread: threading.Thread) -> None:
    """Wait for the thread: if it ended while the interpreter goes, PyTorch could abort the process."""
    calls.put(None)
    if thread is not threading.current_thread():  # which may be the last to refer to the object
        thread.join()


def _run(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        function, answer = call
        try:
            answer((function(), None))
        except BaseException as error:  # belongs to the caller
            answer((None, error))
        del call, function, answer  # they refer to the model, which may be freed during the wait
