"""The front's side of the engine process: starts it, starts it again when it dies, and carries requests to it.

Everything here happens on the event loop's thread, except `prepare`. Must not know: HTTP, what an engine is made of.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.context import SpawnProcess
from typing import cast

from evenflow import errors
from evenflow.core.grammar import Grammar
from evenflow.core.policies import retarget
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.intake import Intake, Limits, TextCodec
from evenflow.errors import EngineFailed, EvenflowError, InvalidRequest
from evenflow.server.engine.process import EngineFactory, run_engine_process
from evenflow.server.engine.restarts import RestartDelay
from evenflow.server.engine.stream import Stream
from evenflow.server.engine.wire import (
    Abort,
    Add,
    Command,
    Event,
    Failed,
    FrameReader,
    Ready,
    Refused,
    SetTarget,
    StepDone,
    Stop,
    StopAfter,
    frame,
    read_event,
)
from evenflow.server.metrics.events import EngineState
from evenflow.server.metrics.observer import Observer

logger = logging.getLogger("evenflow")

_END_S = 5.0  # for a process that was asked to end
_STREAMS_AT_ONCE = 8  # whose tokens are written before the next ones' are looked at


class EngineClient:
    """An engine for the routes to use.

    `factory` builds the engine, in the child process: it must be importable there. Whoever holds a Stream is told at
    once when the process dies; requests are refused until the next one is ready.
    """

    def __init__(
        self,
        factory: EngineFactory,
        codec: TextCodec,
        observer: Observer,
        check_grammar: Callable[[Grammar], None] | None = None,
    ) -> None:
        self._factory = factory
        self._codec = codec
        self._check_grammar = check_grammar
        self._observer = observer
        self._streams: dict[str, Stream] = {}
        self._process: SpawnProcess | None = None
        self._link: _Link | None = None  # only while the engine is ready
        self._failure: EvenflowError = EngineFailed("the engine is starting")  # why there is no link
        self._last_words: EvenflowError | None = None  # of the process at hand
        self._intake: Intake | None = None
        self._ready: Ready | None = None
        self._target: SetTarget | None = None  # that was asked for since the start
        self._policy = ""
        self._num_restarts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._became_ready: asyncio.Future[None] | None = None
        self._is_closing = False
        self._handing_out: Iterator[bool] = iter(())  # the last step's tokens

    # ---- what routes use ----

    @property
    def is_up(self) -> bool:
        return self._link is not None

    @property
    def limits(self) -> Limits:
        assert self._intake is not None
        return self._intake.limits

    @property
    def max_num_seqs(self) -> int:
        assert self._ready is not None
        return self._ready.max_num_seqs

    @property
    def policy(self) -> str:
        return self._policy

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def prepare(
        self, prompt: str | Sequence[int], sampling: SamplingParams, *, request_id: str, tenant: str = ""
    ) -> Request:
        """Check, tokenise and hash a request. Any thread may do this, and for a long prompt should."""
        assert self._intake is not None
        return self._intake.prepare(prompt, sampling, policy=self._policy, request_id=request_id, tenant=tenant)

    def submit(self, request: Request, *, tenant: str = "", num_answers: int | None = 1) -> Stream:
        """Send a prepared request to the engine. `num_answers`: of its call, with the first of them; None: the rest."""
        if self._link is None:
            raise self._failure
        stream = Stream(request, self._codec.stream_decoder(request.tokens))
        self._observer.on_request_started(
            request.id,
            tenant=tenant,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            now=request.arrival_time,
            n=num_answers,
        )
        self._streams[request.id] = stream
        self._link.send(Add.of(request))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose answer nobody wants any more; nothing happens where it has ended."""
        if not stream.is_finished:
            stream.abort()
            self._end(stream)
            self._send(Abort(stream.request.id))

    def set_target(self, seconds: float, paced: bool | None = None) -> None:
        """Keep another target from the next step on; None: paced or strict as before."""
        self._policy = retarget(self._policy, seconds, paced)
        self._target = SetTarget(seconds, self._policy.endswith(",paced"))
        self._send(self._target)
        self._tell_state()

    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error, after what the last step gave it."""
        self._finish_handing_out()
        for stream in list(self._streams.values()):
            self._send(Abort(stream.request.id))
            stream.fail(failure)
            self._end(stream)

    # ---- the life of the process ----

    async def start(self) -> None:
        """Start the engine and wait until it is ready; an error of its making is raised here."""
        self._became_ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._became_ready

    async def close(self) -> None:
        """End the engine, and every open request with it."""
        self._is_closing = True
        self.fail_all(EngineFailed("the server is shutting down"))
        if self._link is not None:
            self._link.send(Stop())
        elif self._process is not None and self._process.pid is not None:  # it is loading, and would not hear
            self._process.kill()
        if self._supervisor is not None:
            _, running = await asyncio.wait([self._supervisor], timeout=_END_S)
            if running:
                self._supervisor.cancel()
                await asyncio.wait(running)

    async def _supervise(self) -> None:
        assert self._became_ready is not None
        loop = asyncio.get_running_loop()
        delays = RestartDelay()
        while True:
            began = loop.time()
            await self._run_process()
            if not self._became_ready.done():
                self._became_ready.set_exception(self._failure)
                return
            if self._is_closing:
                return
            self._num_restarts += 1
            delay = delays.after(loop.time() - began)
            logger.error("%s; it is started again in %.1f s", self._failure, delay)
            await asyncio.sleep(delay)

    async def _run_process(self) -> None:
        """One process, from its start to its end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_engine_process, args=(theirs, self._factory), name="evenflow-engine", daemon=True
        )
        self._process, self._last_words = process, None
        try:
            await asyncio.to_thread(process.start)
            theirs.close()
            link = _Link(self._take)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
            await link.lost
        finally:
            self._go_down()
            await asyncio.to_thread(_end_process, process)

    def _go_down(self) -> None:
        self._failure = self._last_words or EngineFailed("the engine process died")
        if self._link is not None:
            self._link = None
            self.fail_all(self._failure)
            self._tell_state()

    def _tell_state(self) -> None:
        if self._ready is not None:
            ready = self._ready
            self._observer.on_engine_state(
                EngineState(
                    self.is_up,
                    self._num_restarts,
                    ready.max_model_len,
                    ready.num_blocks,
                    ready.block_size,
                    self._policy,
                )
            )

    # ---- events ----

    def _take(self, event: Event, link: _Link) -> None:
        match event:
            case StepDone():
                self._take_step(event)
            case Ready():
                self._go_up(event, link)
            case Refused(request_id, message):
                if (stream := self._streams.get(request_id)) is not None:
                    stream.fail(InvalidRequest(message))
                    self._end(stream)
            case Failed(kind, message):
                self._last_words = getattr(errors, kind, EngineFailed)(message)

    def _go_up(self, ready: Ready, link: _Link) -> None:
        assert self._became_ready is not None
        self._ready, self._link = ready, link
        if self._intake is None:
            limits = Limits(ready.max_model_len, ready.vocab_size)
            self._intake = Intake(limits, ready.block_size, self._codec, check_grammar=self._check_grammar)
        if self._target is None:
            self._policy = ready.policy
        else:
            link.send(self._target)
        self._tell_state()
        if not self._became_ready.done():
            self._became_ready.set_result(None)

    def _take_step(self, step: StepDone) -> None:
        self._observer.on_step(step.event)
        self._finish_handing_out()
        self._handing_out = self._hand_out(step)
        self._go_on_handing_out()

    def _go_on_handing_out(self) -> None:
        """Hand out a few streams' tokens; those that follow have their turn when the loop has written these."""
        if next(self._handing_out, False):
            asyncio.get_running_loop().call_soon(self._go_on_handing_out)

    def _finish_handing_out(self) -> None:
        for _ in self._handing_out:
            pass

    def _hand_out(self, step: StepDone) -> Iterator[bool]:
        """Give every stream its tokens, and yield between a few and the next. This runs for every token."""
        now, streams = step.event.at, self._streams
        started, ended, logprobs = step.started, step.ended, step.logprobs
        for row, (request_id, tokens) in enumerate(zip(step.ids, step.tokens, strict=True)):
            if row and row % _STREAMS_AT_ONCE == 0:
                yield True
            stream = streams.get(request_id)
            if stream is None:  # it ended here before the engine knew
                continue
            if row in started:
                stream.start(started[row])
            if stream.take(tokens, logprobs.get(row), ended.get(row), now):
                self._send(StopAfter(request_id, len(stream.output.token_ids)))
            if stream.is_finished:
                self._end(stream)

    def _end(self, stream: Stream) -> None:
        del self._streams[stream.request.id]
        output = stream.output
        assert output.finish_reason is not None
        self._observer.on_request_finished(
            stream.request.id, output.finish_reason, len(output.token_ids), self._observer.clock()
        )

    def _send(self, command: Command) -> None:
        if self._link is not None:  # an engine that is gone knows no request, and the next one is told the target
            self._link.send(command)


class _Link(asyncio.Protocol):
    """The socket to one engine process."""

    def __init__(self, take: Callable[[Event, _Link], None]) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for content in self._frames.feed(data):
            self._take(read_event(content), self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.lost.done():
            self.lost.set_result(None)

    def send(self, command: Command) -> None:
        assert self._transport is not None
        self._transport.write(frame(command))


def _end_process(process: SpawnProcess) -> None:
    process.join(_END_S)
    if process.is_alive():
        process.kill()
        process.join()
