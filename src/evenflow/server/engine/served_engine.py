"""The front's side of the engine process: starts it, restarts it when it dies, and carries requests to it.

Everything here happens on the event loop's thread, except `prepare`.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
from collections.abc import Callable, Sequence
from multiprocessing.context import SpawnProcess
from typing import cast

from evenflow import errors
from evenflow.core.grammar import Grammar
from evenflow.core.policies import DEFAULT_POLICY, PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.client import EngineClient, Stream
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.messages import Command, Event, Failed, Ready, Refused, SetPolicy, Stepped, Stop, read_event
from evenflow.engine.outputs import TextCodec
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.framing import FrameReader, frame
from evenflow.server.engine.process import EngineFactory, run_engine_process
from evenflow.server.engine.restarts import RestartDelay
from evenflow.server.metrics.observer import EngineState, Observer

logger = logging.getLogger("evenflow")

_EXIT_TIMEOUT_S = 5.0


class ServedEngine:
    """An engine for the routes to use.

    `factory` builds the engine, in the child process: it must be importable there. When the process dies, every open
    stream fails at once; requests are refused until the next process is ready.
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
        self._client = EngineClient(codec, self._send, self._on_end)
        self._process: SpawnProcess | None = None
        self._link: _Link | None = None  # only while the engine is ready
        self._failure: EvenflowError = EngineFailed("the engine is starting")  # why there is no link
        self._exit_error: EvenflowError | None = None  # of the current process
        self._intake: Intake | None = None
        self._ready: Ready | None = None
        self.policy: PolicySpec = DEFAULT_POLICY
        self._is_policy_changed = False  # since the start: a new process must be sent it
        self._num_restarts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._became_ready: asyncio.Future[None] | None = None
        self._is_closing = False

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
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._client.num_open

    def prepare(
        self, prompt: str | Sequence[int], sampling: SamplingParams, *, request_id: str, tenant: str = ""
    ) -> Request:
        """Check, tokenise and hash a request, on any thread."""
        assert self._intake is not None
        return self._intake.prepare(prompt, sampling, policy=self.policy, request_id=request_id, tenant=tenant)

    def submit(self, request: Request, *, tenant: str = "", num_choices: int | None = 1) -> Stream:
        """Send a prepared request to the engine. `num_choices` of its API call goes with the first of them."""
        if self._link is None:
            raise self._failure
        self._observer.on_request_started(
            request.id,
            tenant=tenant,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.sampling.max_tokens,
            now=request.arrival_time,
            n=num_choices,
        )
        return self._client.submit(request)

    def abort(self, stream: Stream) -> None:
        """End a request whose output nobody wants any more; does nothing if it has ended."""
        self._client.abort(stream)

    def set_target(self, seconds: float | None, paced: bool | None = None) -> None:
        """Keep another target from the next step on, paced as before unless stated; None: keep none."""
        self.policy, self._is_policy_changed = self.policy.with_target(seconds, paced), True
        self._send(SetPolicy.of(self.policy))
        self._publish_state()

    def fail_all(self, failure: EvenflowError) -> None:
        """End every open request with this error, after the last step's tokens."""
        self._client.fail_all(failure)

    # ---- the life of the process ----

    async def start(self) -> None:
        """Start the engine and wait until it is ready; raises the error it failed with."""
        self._became_ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise())
        await self._became_ready

    async def close(self) -> None:
        """End the engine, and every open request with it."""
        self._is_closing = True
        self.fail_all(EngineFailed("the server is shutting down"))
        if self._link is not None:
            self._link.send(Stop())
        elif self._process is not None and self._process.pid is not None:  # it is loading and reads no commands yet
            self._process.kill()
        if self._supervisor is not None:
            _, running = await asyncio.wait([self._supervisor], timeout=_EXIT_TIMEOUT_S)
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
            logger.error("%s; restarting it in %.1f s", self._failure, delay)
            await asyncio.sleep(delay)

    async def _run_process(self) -> None:
        """One process, from its start to its end."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=run_engine_process, args=(theirs, self._factory), name="evenflow-engine", daemon=True
        )
        self._process, self._exit_error = process, None
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
        self._failure = self._exit_error or EngineFailed("the engine process died")
        if self._link is not None:
            self._link = None
            self.fail_all(self._failure)
            self._publish_state()

    def _publish_state(self) -> None:
        if self._ready is not None:
            ready = self._ready
            self._observer.on_engine_state(
                EngineState(
                    self.is_up,
                    self._num_restarts,
                    ready.max_model_len,
                    ready.num_blocks,
                    ready.block_size,
                    str(self.policy),
                    self.policy.target,
                )
            )

    # ---- events ----

    def _take(self, event: Event, link: _Link) -> None:
        match event:
            case Stepped(report):
                self._observer.on_step(report)
                self._client.take(event)
            case Refused():
                self._client.take(event)
            case Ready():
                self._go_up(event, link)
            case Failed(kind, message):
                self._exit_error = getattr(errors, kind, EngineFailed)(message)

    def _go_up(self, ready: Ready, link: _Link) -> None:
        assert self._became_ready is not None
        self._ready, self._link = ready, link
        if self._intake is None:
            limits = Limits(ready.max_model_len, ready.vocab_size)
            self._intake = Intake(limits, ready.block_size, self._codec, check_grammar=self._check_grammar)
        if self._is_policy_changed:
            link.send(SetPolicy.of(self.policy))
        else:
            self.policy = ready.policy.spec()
        self._publish_state()
        if not self._became_ready.done():
            self._became_ready.set_result(None)

    def _on_end(self, stream: Stream) -> None:
        output = stream.output
        assert output.finish_reason is not None
        self._observer.on_request_finished(
            stream.request.id, output.finish_reason, len(output.token_ids), self._observer.clock()
        )

    def _send(self, command: Command) -> None:
        if self._link is not None:  # a process that is gone has no requests, and the next one is sent the policy
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
    process.join(_EXIT_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
