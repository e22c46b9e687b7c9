"""The event loop's side of an engine: requests in, a stream of deltas out for each.

The engine itself runs elsewhere, on a thread (`AsyncLLM`) or in a process (the server). Everything here happens on the
event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace

from evenflow.core.report import StepReport
from evenflow.core.request import FinishReason, Request
from evenflow.engine.messages import Abort, Add, Command, Refused, Stepped, StopAfter
from evenflow.engine.outputs import Delta, Outputs, RequestOutput, TextCodec
from evenflow.errors import EvenflowError, InvalidRequest

_STREAMS_AT_ONCE = 8  # served before the event loop may write


class Stream:
    """An async iterator of deltas. Deltas not awaited yet are merged."""

    def __init__(self, request: Request, output: RequestOutput, engine_id: str, is_shown: bool = True) -> None:
        self.request = request
        self.output = output
        self.engine_id = engine_id  # the request's name in messages to and from the engine
        self.is_shown = is_shown  # token by token; else it is seen only when complete
        self.was_restarted = False
        self._delta: Delta | None = None  # pushed, not awaited yet
        self._failure: EvenflowError | None = None
        self._is_exhausted = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    def push(self, delta: Delta) -> None:
        if (before := self._delta) is not None:
            delta = delta._replace(token_ids=before.token_ids + delta.token_ids, text=before.text + delta.text)
        self._delta = delta
        self._wake()

    def fail(self, failure: EvenflowError) -> None:
        """Raise this error after the deltas pushed so far."""
        self._failure = failure
        self._wake()

    def restart(self, output: RequestOutput) -> None:
        """Start over: another engine recomputes the request."""
        self.output, self._delta, self.was_restarted = output, None, True

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            try:
                waiter.set_result(None)
            except RuntimeError:
                self._waiter = None  # its event loop is closed

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self._is_exhausted:
            raise StopAsyncIteration
        if self._delta is None and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        delta, self._delta = self._delta, None
        if self._failure is not None:
            if delta is not None and delta.token_ids:
                return delta._replace(finish_reason=None)
            self._is_exhausted = True
            raise self._failure
        assert delta is not None
        self._is_exhausted = delta.finish_reason is not None
        return delta


class EngineClient:
    """The open requests of one engine. `send` carries commands to it; `take` is called with its events."""

    def __init__(
        self,
        codec: TextCodec | None,
        send: Callable[[Command], None],
        on_end: Callable[[Stream], None] = lambda stream: None,
    ) -> None:
        self._send = send
        self._on_end = on_end
        self._outputs = Outputs(codec, lambda request_id, num_tokens: send(StopAfter(request_id, num_tokens)))
        self._streams: dict[str, Stream] = {}
        self._backlog: Iterator[None] = iter(())  # the last step's tokens

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def submit(
        self, request: Request, is_shown: bool = True, engine_id: str | None = None, command: Add | None = None
    ) -> Stream:
        """Send a request, under its own name or this one, which must be new to the engine.

        `command` sends it, if it was made before.
        """
        if request.id in self._streams:  # a stream is never taken over
            raise InvalidRequest(f"Got request id {request.id!r} but a request with that id is being served.")
        engine_id = engine_id or request.id
        self._send(command or _add(request, engine_id))  # if this fails, nothing has been registered
        output = self._outputs.add(request, engine_id)
        stream = self._streams[request.id] = Stream(request, output, engine_id, is_shown)
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose output is no longer wanted; does nothing if it has ended."""
        delta = self._outputs.finish(stream.engine_id, FinishReason.ABORT)
        if delta is not None:
            self._send(Abort(stream.engine_id))
            self._end(stream, delta)

    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error, after the last step's tokens."""
        self._drain_backlog()
        for stream in list(self._streams.values()):
            self._send(Abort(stream.engine_id))
            self._fail(stream.engine_id, failure)

    def lose_engine(self, failure: EvenflowError) -> list[Stream]:
        """The engine died. Requests that showed no token wait for the next engine, once; others end with this error.

        Returns the waiting streams: `resend` sends their requests.
        """
        self._drain_backlog()
        waiting = []
        for stream in list(self._streams.values()):
            if stream.was_restarted or (stream.is_shown and stream.output.token_ids):
                self._fail(stream.engine_id, failure)
            else:
                stream.restart(self._outputs.add(stream.request, stream.engine_id))
                waiting.append(stream)
        return waiting

    def resend(self) -> None:
        """Give the open requests to a new engine."""
        for stream in self._streams.values():
            self._send(_add(stream.request, stream.engine_id))

    def take(self, event: Stepped | Refused) -> None:
        if isinstance(event, Stepped):
            self._drain_backlog()
            self._backlog = self._hand_out(event.report)
            self._continue()
        else:
            self._drain_backlog()  # which may hold its last tokens
            self._fail(event.id, event.error())

    def _continue(self) -> None:
        """Hand out a few streams' tokens; the others follow once the loop has written these."""
        if next(self._backlog, self) is None:
            asyncio.get_running_loop().call_soon(self._continue)

    def _drain_backlog(self) -> None:
        for _ in self._backlog:
            pass

    def _hand_out(self, report: StepReport) -> Iterator[None]:
        streams = self._streams
        for row, delta in enumerate(self._outputs.take(report), start=1):
            stream = streams[delta.request_id]
            if delta.finish_reason is not None:
                self._end(stream, delta)
            elif stream.is_shown:  # else merging would take time for each token so far
                stream.push(delta)
            if row % _STREAMS_AT_ONCE == 0 and row < len(report.ids):
                yield

    def _fail(self, engine_id: str, failure: EvenflowError) -> None:
        delta = self._outputs.finish(engine_id, FinishReason.ERROR, str(failure))
        if delta is not None:  # else it has ended already
            stream = self._streams[delta.request_id]
            stream.fail(failure)
            self._end(stream, delta)

    def _end(self, stream: Stream, delta: Delta) -> None:
        del self._streams[stream.request.id]
        stream.push(delta)
        self._on_end(stream)


def _add(request: Request, engine_id: str) -> Add:
    record = request.record()
    return Add(record if engine_id == record.id else replace(record, id=engine_id))
