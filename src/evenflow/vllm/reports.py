"""What the plug-in tells of its steps: a line in vLLM's log every so often, and each step to whoever listens.

Steps go out as the messages that evenflow's own server is made of, so that its metrics and page can show vLLM's steps.
Nobody is waited for: what finds no room is kept for later, up to a limit. Must not know: vLLM's classes.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from evenflow.core.plan import StepShape

if TYPE_CHECKING:
    from evenflow.vllm.messages import SteeredStep

logger = logging.getLogger("vllm.evenflow")  # vLLM shows what its own loggers say

LOG_INTERVAL_S = 10.0
_MAX_UNSENT_BYTES = 4 << 20  # thousands of steps


class ChunkDone(NamedTuple):
    request_id: str
    start: int
    length: int
    reason: str
    gave_token: bool


class LateToken(NamedTuple):
    request_id: str
    gap: float
    seconds: float  # after its deadline


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of vLLM's, as evenflow saw it."""

    step_id: int
    at: float
    seconds: float
    is_own_time: bool  # of these seconds: they hold nothing of another step's
    predicted_seconds: float
    predicted_decode_seconds: float  # had it only decoded
    shape: StepShape
    chunks: Sequence[ChunkDone]
    decoded: Sequence[str]
    late: Sequence[LateToken]
    num_output_tokens: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    feasible_target: float | None


@dataclass(slots=True)
class _Interval:
    """What the next line of the log will say."""

    since: float
    num_steps: int = 0
    num_mixed_steps: int = 0
    num_prefill_tokens: int = 0
    num_tokens: int = 0
    num_late_tokens: int = 0
    worst_gap: float = 0.0
    errors: list[float] = field(default_factory=list)  # of predictions, relative

    def add(self, step: StepDone) -> None:
        self.num_steps += 1
        self.num_tokens += step.num_output_tokens
        self.num_late_tokens += len(step.late)
        self.worst_gap = max([self.worst_gap, *(late.gap for late in step.late)])
        if step.shape.prefill_rows and step.shape.decode_sequences:
            self.num_mixed_steps += 1
            self.num_prefill_tokens += step.shape.prefill_rows
            if step.is_own_time:
                self.errors.append(abs(step.predicted_seconds - step.seconds) / step.seconds)


class _Listener:
    """Who is told of each step, at the other end of a Unix stream socket, once there is somebody."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._unsent = bytearray()

    def has_room(self) -> bool:
        """May more be sent? Not while so much is left that whoever listens must have stopped."""
        self._flush()
        return len(self._unsent) < _MAX_UNSENT_BYTES

    def send(self, content: bytes) -> None:
        """Send this, or what the socket has room for now, and the rest later."""
        self._unsent += content
        self._flush()

    def _flush(self) -> None:
        try:
            if self._socket is None:
                self._socket = _connect(self._path)
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass  # who listens is slow
        except OSError:  # nobody listens
            self.close()

    def close(self) -> None:
        self._unsent.clear()
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


class Reporter:
    """Tells of steps as they end."""

    def __init__(self, policy: str, target: float, budget: int, step_socket: str | None) -> None:
        self._policy = policy
        self._target = target
        self._budget = budget
        self._interval: _Interval | None = None
        self._arrived: list[tuple[str, float, int, int]] = []  # since the last message, as are those that left
        self._left: list[tuple[str, int]] = []
        self._listener = _Listener(step_socket) if step_socket else None

    def retarget(self, policy: str, target: float) -> None:
        """From here on steps keep this target."""
        self._policy, self._target = policy, target

    def arrived(self, request_id: str, at: float, num_prompt_tokens: int, max_tokens: int) -> None:
        """A request came to the scheduler; the next message says so."""
        if self._listener is not None:
            self._arrived.append((request_id, at, num_prompt_tokens, max_tokens))

    def left(self, request_id: str, num_output_tokens: int) -> None:
        """A request is gone, with its last token or without; the next message says so."""
        if self._listener is not None:
            self._left.append((request_id, num_output_tokens))

    def report(self, step: StepDone) -> None:
        """Take in a step that is through."""
        if self._interval is None:
            self._interval = _Interval(since=step.at - step.seconds)
        self._interval.add(step)
        if step.at - self._interval.since >= LOG_INTERVAL_S:
            self._log(self._interval, step.at)
            self._interval = None
        if self._listener is not None and self._listener.has_room():
            self._tell(self._listener, step)

    def close(self) -> None:
        """No step follows."""
        if self._listener is not None:
            self._listener.close()

    def _log(self, interval: _Interval, now: float) -> None:
        if not interval.num_mixed_steps:
            return
        logger.info(
            "evenflow: in %.0f s %d steps, %d of them with prefill beside decodes (%.0f tokens each on average); "
            "%.2f%% of %d tokens later than %.0f ms, longest gap of these %.0f ms%s",
            now - interval.since,
            interval.num_steps,
            interval.num_mixed_steps,
            interval.num_prefill_tokens / interval.num_mixed_steps,
            100 * interval.num_late_tokens / max(1, interval.num_tokens),
            interval.num_tokens,
            1000 * self._target,
            1000 * interval.worst_gap,
            f"; step times predicted within {100 * fmean(interval.errors):.1f}%" if interval.errors else "",
        )

    def _tell(self, listener: _Listener, step: StepDone) -> None:
        from evenflow.server.engine.wire import (
            frame,  # it needs msgspec: the base package does without it, vLLM does not
        )

        listener.send(frame(self._message(step)))
        self._arrived.clear()
        self._left.clear()

    def _message(self, step: StepDone) -> SteeredStep:
        from evenflow.server.metrics.events import CauseEvent, ChunkEvent, StallEvent
        from evenflow.vllm.messages import RequestArrived, RequestLeft, SteeredStep

        prefill_seconds = step.seconds * (1 - _share(step.predicted_decode_seconds, step.predicted_seconds))
        per_token = prefill_seconds / max(1, step.shape.prefill_rows)
        chunks = [
            ChunkEvent(chunk.request_id, chunk.start, chunk.length, chunk.reason, chunk.length * per_token, chunk[-1])
            for chunk in step.chunks
        ]
        stall = None
        if step.late:
            worst = max(step.late, key=lambda late: late.gap)
            causes = [
                CauseEvent("decodes", min(step.predicted_decode_seconds, step.seconds)),
                *(CauseEvent("prefill", chunk.seconds, chunk.request_id, chunk.length) for chunk in chunks),
            ]
            causes.append(CauseEvent("unexplained", max(0.0, worst.gap - sum(cause.seconds for cause in causes))))
            causes.sort(key=lambda cause: -cause.seconds)
            stall = StallEvent(worst.request_id, worst.gap, worst.seconds, causes)
        return SteeredStep(
            step_id=step.step_id,
            at=step.at,
            seconds=step.seconds,
            predicted_seconds=step.predicted_seconds,
            decode_seconds=step.seconds - prefill_seconds,
            num_decodes=step.shape.decode_sequences,
            decoded=list(step.decoded),
            chunks=chunks,
            admissions=[],
            budget=self._budget,
            num_output_tokens=step.num_output_tokens,
            num_late_tokens=len(step.late),
            num_running=step.num_running,
            num_waiting=step.num_waiting,
            kv_cache_usage=step.kv_cache_usage,
            policy=self._policy,
            target_s=self._target,
            feasible_target_s=step.feasible_target,
            stall=stall,
            arrived=[RequestArrived(*one) for one in self._arrived],
            left=[RequestLeft(*one) for one in self._left],
            is_own_time=step.is_own_time,
        )


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 0.0
