"""What an interrupt (Ctrl-C) does to a command: it raises KeyboardInterrupt, or ends the process during imports.

Imports almost nothing, because an interrupt may arrive while the command is being imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # the exit code
_SHOW_CURSOR = "\x1b[?25h"  # a status line hides it
_CLEAR_LINE = b"\r\x1b[2K"
_STOPPING = b"Stopping after the step that runs now; Ctrl-C again quits at once.\n"
_STDERR = 2


def raise_at_interrupt() -> None:
    """Handle interrupts in this process, unless its parent has set them to be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise)


def exit_at_interrupt() -> None:
    """From now on an interrupt ends the process at once."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def stopping_after_step(stop: Callable[[], None] | None = None) -> Iterator[None]:
    """For a block that runs an engine and closes it, which waits for a step: it may take long, and cannot be stopped.

    The first interrupt says so at once and calls `stop`; None: as before. The second ends the process.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt, is_stopping = before, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopping
        if is_stopping:
            _exit(number, frame)
        is_stopping = True
        # Straight to the terminal: sys.stderr may be in the middle of a write.
        os.write(_STDERR, (_CLEAR_LINE if os.isatty(_STDERR) else b"") + _STOPPING)
        if stop is None:
            interrupt(number, frame)
        else:
            stop()

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _raise(number: int, frame: FrameType | None) -> None:
    # Modules written in C drop a KeyboardInterrupt in their imports, or turn it into an ImportError. Nothing needs to
    # be cleaned up before they are imported.
    if _is_importing(frame):
        _exit(number, frame)
    raise KeyboardInterrupt


def _exit(number: int, frame: FrameType | None) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR + "\n")
        sys.stderr.flush()
    os._exit(INTERRUPTED)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False
