"""The engine process: commands in, one message per step out.

One thread reads commands. The main thread runs steps and never waits for the socket: another thread sends what does
not fit into it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from evenflow.config import EngineConfig
from evenflow.engine.engine import Engine
from evenflow.engine.loop import Commands, run_engine
from evenflow.engine.messages import Event, Stop, read_command
from evenflow.engine.watchdog import Cell
from evenflow.framing import FrameReader, frame

logger = logging.getLogger("evenflow")

EngineFactory = Callable[[], Engine]

_RECEIVE_BYTES = 1 << 18


def build_served_engine(config: EngineConfig, record: Path | None = None) -> Engine:
    """The engine that `evenflow serve` runs. A restarted one records to a file of its own, beside the first."""
    from evenflow.engine.build import build_engine
    from evenflow.engine.recorder import next_recording

    if record is not None and (found := next_recording(record)) != record:
        logger.warning("Recording to %s: %s has the steps before the restart.", found, record)
        record = found
    return build_engine(config, record).engine


def run_engine_process(connection: socket.socket, factory: EngineFactory, pulse: Cell) -> None:
    """The main function of the process, which ends when the front does. The front watches its pulse."""

    def build() -> Engine:
        engine = factory()
        engine.pulse.share(pulse)
        return engine

    commands: Commands = Commands()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    events = EventWriter(connection)
    try:
        run_engine(build, commands, events.send)
    finally:
        events.close()


def _read_commands(connection: socket.socket, commands: Commands) -> None:
    frames = FrameReader()
    with contextlib.suppress(OSError):
        while data := connection.recv(_RECEIVE_BYTES):
            for content in frames.feed(data):
                commands.put(read_command(content))
    commands.put(Stop())


class EventWriter:
    """Sends events in order without blocking. It tries at once: another thread would have to wait for the GIL."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent: deque[bytes] = deque()  # for the thread, which is sending the first
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send_rest, daemon=True)
        self._thread.start()

    def send(self, event: Event) -> None:
        content = frame(event)
        with self._changed:
            if not self._unsent:
                content = content[self._send_now(content) :]
            if content:
                self._unsent.append(content)
                self._changed.notify()

    def close(self) -> None:
        """Wait until everything is sent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _send_now(self, content: bytes) -> int:
        """The number of bytes that fit into the socket."""
        try:
            return self._connection.send(content, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the front is gone: the reading thread sees that too and ends the process
            return len(content)

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._unsent or self._is_closed)
                if not self._unsent:
                    return
            with contextlib.suppress(OSError):
                self._connection.sendall(self._unsent[0])
            with self._changed:
                self._unsent.popleft()
