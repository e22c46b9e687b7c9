"""The engine in a process of its own: commands in, one message a step out, and nothing but steps in between.

One thread reads commands; the main thread steps, and never waits for the socket: what finds no room there is left to a
thread that does.
Must not know: text, HTTP, who asks.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from evenflow.config import EngineConfig
from evenflow.core.scheduler import Committed
from evenflow.engine.engine import Engine
from evenflow.engine.outputs import Delta
from evenflow.errors import EvenflowError
from evenflow.server.engine.wire import (
    Abort,
    Add,
    Command,
    Ended,
    Event,
    Failed,
    FrameReader,
    Ready,
    Refused,
    SetTarget,
    Started,
    StepDone,
    Stop,
    StopAfter,
    frame,
    read_command,
)
from evenflow.server.metrics.events import step_event

EngineFactory = Callable[[], Engine]

_RECEIVE_BYTES = 1 << 18
_PENDING_COMMANDS_BEFORE_A_STEP = 64


def build_served_engine(config: EngineConfig, record: Path | None = None) -> Engine:
    """The engine that `evenflow serve` runs: tokens in, tokens out."""
    from evenflow.engine.build import build_engine

    engine = build_engine(config, record).engine
    engine.codec = None
    return engine


def run_engine_process(connection: socket.socket, factory: EngineFactory) -> None:
    """The whole life of the process; it ends with the front, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is for the front to handle
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(connection, commands), daemon=True).start()
    events = EventWriter(connection)
    try:
        EngineServer(factory(), commands, events.send).run()
    except EvenflowError as error:
        events.send(Failed(type(error).__name__, str(error)))
    except Exception as error:
        events.send(Failed("EngineFailed", f"the engine stopped: {error!r}"))
        raise
    finally:
        events.close()


def _read_commands(connection: socket.socket, commands: queue.SimpleQueue[Command]) -> None:
    frames = FrameReader()
    with contextlib.suppress(OSError):
        while data := connection.recv(_RECEIVE_BYTES):
            for content in frames.feed(data):
                commands.put(read_command(content))
    commands.put(Stop())


class EventWriter:
    """Sends events in order and at once, without waiting: a thread would first have to wait for the interpreter."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._unsent: deque[bytes] = deque()  # what the thread sends; the first is under way
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
        """How many bytes found room."""
        try:
            return self._connection.send(content, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:  # the front is gone: the reader sees that too, and ends the process
            return len(content)

    def _send_rest(self) -> None:
        while self._wait_for_rest():
            with contextlib.suppress(OSError):
                self._connection.sendall(self._unsent[0])
            with self._changed:
                self._unsent.popleft()

    def _wait_for_rest(self) -> bool:
        """False: there is none, and will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._is_closed)
            return bool(self._unsent)


class EngineServer:
    """Steps one engine as long as there is work, and obeys between steps."""

    def __init__(self, engine: Engine, commands: queue.SimpleQueue[Command], send: Callable[[Event], None]) -> None:
        self._engine = engine
        self._commands = commands
        self._send = send
        self._committed: tuple[Committed, float] | None = None
        engine.watch_step = self._remember

    def _remember(self, committed: Committed, now: float) -> None:
        self._committed = committed, now

    def run(self) -> None:
        engine, config = self._engine, self._engine.scheduler.config
        self._send(
            Ready(
                engine.limits.max_model_len,
                engine.limits.vocab_size,
                config.block_size,
                config.num_blocks,
                config.max_num_seqs,
                config.policy,
            )
        )
        try:
            while self._obey():
                deltas = engine.step()
                if self._committed is not None:
                    self._send(self._step_done(*self._committed, deltas))
                    self._committed = None
        finally:
            engine.close()

    def _obey(self) -> bool:
        """Take in commands, waiting for one where there is nothing else to do. False: stop."""
        for _ in range(_PENDING_COMMANDS_BEFORE_A_STEP):
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match command:
                case Add():
                    self._add(command)
                case Abort(id):
                    self._engine.abort(id)
                case StopAfter(id, num_tokens):
                    self._engine.stop(id, num_tokens)
                case SetTarget(seconds, paced):
                    self._engine.set_target(seconds, paced)
                case Stop():
                    return False
        return True

    def _add(self, command: Add) -> None:
        try:
            self._engine.add(command.request())
        except EvenflowError as error:
            self._send(Refused(command.id, str(error)))

    def _step_done(self, committed: Committed, now: float, deltas: list[Delta]) -> StepDone:
        done = StepDone(step_event(self._engine, committed, now), [], [], {}, {}, {})
        for row, (request_id, tokens, _, finish_reason, output) in enumerate(deltas):
            done.ids.append(request_id)
            done.tokens.append(tokens)
            if tokens and len(output.token_ids) == len(tokens):
                done.started[row] = Started(output.num_cached_tokens, output.chunks, output.prompt_logprobs)
            if finish_reason is not None:
                done.ended[row] = Ended(finish_reason, output.error)
            if output.logprobs is not None:
                done.logprobs[row] = tuple(output.logprobs[len(output.logprobs) - len(tokens) :])
        return done
