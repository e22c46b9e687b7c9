"""What an interrupt (Ctrl-C) does to a command: it raises KeyboardInterrupt, or ends the process during imports.

Imports next to nothing, because an interrupt may come while the command is being imported.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # the exit code
_SHOW_CURSOR = "\x1b[?25h"  # a status line hides it


def raise_at_interrupt() -> None:
    """Handle interrupts in this process, unless its parent has set them to be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise)


def exit_at_interrupt() -> None:
    """From now on an interrupt ends the process at once."""
    if signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, _exit)


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
