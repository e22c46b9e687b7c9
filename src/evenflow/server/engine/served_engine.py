"""The front's side of the engine process: starts it, and carries requests to it and tokens back."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from evenflow.core.grammar import Grammar
from evenflow.core.policies import DEFAULT_POLICY, PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.service_classes import DEFAULT_CLASSES
from evenflow.engine.client import EngineClient, Stream
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.messages import Add, Command, Failed, Ready, Refused, SetPolicy, SetWeights, Stepped, read_event
from evenflow.engine.outputs import TextCodec
from evenflow.engine.watchdog import Cell, is_overdue
from evenflow.errors import EngineFailed, EvenflowError
from evenflow.host import start_shielded
from evenflow.server.access import Caller
from evenflow.server.engine.link import Link
from evenflow.server.engine.process import EngineFactory, run_engine_process
from evenflow.server.engine.supervised import SupervisedEngine
from evenflow.server.metrics.observer import Observer, ServedRequest

logger = logging.getLogger("evenflow")

_EXIT_TIMEOUT_S = 5.0
_CHECK_S = 0.5
_MAX_IDLE_CHECKS = 20  # in a row, of an engine that does nothing with requests open


class Prepared(NamedTuple):
    """A request that has been checked, tokenised, hashed and encoded."""

    request: Request
    command: Add  # what is sent for it


@dataclass(slots=True, eq=False)
class ServedModel:
    """What an engine serves. `factory` builds it in the child process, which must be able to import it."""

    name: str
    factory: EngineFactory
    codec: TextCodec
    intake: Intake | None = None  # since it was first loaded
    policy: PolicySpec = DEFAULT_POLICY  # when it was last loaded


class ServedEngine(SupervisedEngine):
    """The engine of evenflow itself, which serves one model at a time."""

    policy: PolicySpec

    def __init__(self, model: ServedModel, observer: Observer) -> None:
        super().__init__("the engine", DEFAULT_POLICY, observer)
        self.model = model
        self._client = EngineClient(model.codec, self._send, self._on_end)
        self._link: Link | None = None
        self._exit_error: EvenflowError | None = None  # of the current process
        self._new_weights: dict[str, float] | None = None  # of tenants, since the start of the server
        self._num_idle_checks = 0
        self.max_num_seqs = 0  # until the engine is ready
        self.classes = DEFAULT_CLASSES  # likewise

    # ---- what routes use ----

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self._client.num_open

    def prepare(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        tenant: str = "",
        cache_salt: str | None = None,
        service_class: str | None = None,
    ) -> Prepared:
        """Check, tokenise, hash and encode a request, on any thread."""
        assert self.model.intake is not None
        request = self.model.intake.prepare(
            prompt,
            sampling,
            policy=self.policy,
            request_id=request_id,
            tenant=tenant,
            cache_salt=cache_salt,
            service_class=service_class,
        )
        return Prepared(request, Add.encoded(request))

    def submit(
        self,
        prepared: Prepared,
        *,
        caller: Caller,
        tenant: str = "",
        endpoint: str = "",
        model: str = "",
        num_choices: int | None = 1,
        is_shown: bool = True,
    ) -> Stream:
        """Send a prepared request to the engine. `num_choices` of its API call goes with the first of them.

        If it is not shown token by token, it can begin again when the engine dies.
        """
        if not self.is_up:
            raise self.failure
        request = prepared.request
        sizes = request.num_prompt_tokens, request.sampling.max_tokens
        record = ServedRequest(
            request.id,
            tenant,
            *sizes,
            started_at=request.arrival_time,
            key=caller.name,
            endpoint=endpoint,
            model=model,
            service_class=request.service_class,
        )
        stream = self._client.submit(request, is_shown, command=prepared.command)
        self._observer.on_request_started(record, num_choices)
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose output nobody wants any more; does nothing if it has ended."""
        self._client.abort(stream)

    def set_target(self, target: float | str | None, paced: bool | None = None) -> None:
        self.policy = self.policy.with_target(target, paced)
        self._send(SetPolicy(self.policy))
        self._publish_state()

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Share by these weights from the next step on."""
        self._new_weights = dict(weights)
        self._send(SetWeights(self._new_weights))

    def fail_all(self, failure: EvenflowError) -> None:
        self._client.fail_all(failure)

    def _lose_requests(self, failure: EvenflowError) -> None:
        for stream in self._client.lose_engine(failure):
            self._observer.on_request_retried(stream.request.id)

    # ---- the process ----

    async def switch(self, model: ServedModel) -> None:
        """Serve another model, while no request is open. Raises the error that its start fails with."""
        self.model.policy = self.policy
        await self.close()
        self._go_down(EngineFailed(f"the model {model.name!r} is being loaded"))
        self.model, self.policy = model, model.policy
        self._client = EngineClient(model.codec, self._send, self._on_end)
        await self.start()

    async def _run_process(self) -> None:
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("spawn")
        pulse = context.Value("d", math.inf, lock=False)
        arguments = (theirs, self.model.factory, pulse)
        process = context.Process(target=run_engine_process, args=arguments, name="evenflow-engine", daemon=True)
        start_shielded(process)
        theirs.close()
        logger.info("The engine starts in process %d.", process.pid)
        self._exit_error = None
        link = self._link = Link(self._on_event)
        try:
            await link.connect(ours)
            await self._watch(process, link, pulse)
            self._go_down(self._exit_error or EngineFailed("the engine process died"))
        except asyncio.CancelledError:
            if not self.is_up:  # it is still loading, and would finish that first
                process.kill()
            raise
        finally:
            link.close()
            await asyncio.to_thread(_end_process, process)

    async def _watch(self, process: SpawnProcess, link: Link, pulse: Cell) -> None:
        """Wait for the end of the process. If it hangs, or does nothing although requests are open, kill it."""
        while not (await asyncio.wait([link.lost], timeout=_CHECK_S))[0]:
            is_idle = self.is_up and self.num_open > 0 and math.isinf(pulse.value)
            self._num_idle_checks = self._num_idle_checks + 1 if is_idle else 0
            problem = None
            if is_overdue(pulse, time.perf_counter()):
                problem = "hung in a step"
            elif self._num_idle_checks >= _MAX_IDLE_CHECKS:
                problem = f"did nothing with {self.num_open} requests open"
            if problem is not None:
                self._exit_error = EngineFailed(f"the engine {problem} and was killed")
                process.kill()
                await link.lost
                return

    def _on_event(self, content: bytes) -> None:
        match event := read_event(content):
            case Stepped(report):
                self._num_idle_checks = 0
                self._observer.on_step(report)
                self._client.take(event)
            case Refused():
                if event.late or event.expired:
                    self._observer.on_request_rejected("late" if event.late else "expired")
                self._client.take(event)
            case Ready():
                self._on_ready(event)
            case Failed():
                self._exit_error = event.error()

    def _on_ready(self, ready: Ready) -> None:
        self.max_num_seqs = ready.max_num_seqs
        model, self.classes = self.model, ready.classes
        if model.intake is None:
            limits = Limits(ready.max_model_len, ready.vocab_size)
            model.intake = Intake(
                limits, ready.block_size, model.codec, check_grammar=_checked_before, classes=ready.classes
            )
            self.policy = ready.policy
        self._observer.on_model_loaded(model.name)
        self._go_up(max_model_len=ready.max_model_len, num_blocks=ready.num_blocks, block_size=ready.block_size)
        if self.policy != ready.policy:  # it was changed before this restart
            self._send(SetPolicy(self.policy))
        if self._new_weights is not None:
            self._send(SetWeights(self._new_weights))
        self._client.resend()

    def _on_end(self, stream: Stream) -> None:
        output = stream.output
        assert output.finish_reason is not None
        num_tokens = len(output.token_ids)
        self._observer.on_request_finished(stream.request.id, output.finish_reason, num_tokens, error=output.error)

    def _send(self, command: Command) -> None:
        if self.is_up and self._link is not None:  # a process that is gone has no requests
            self._link.send(command)


def _checked_before(grammar: Grammar) -> None:
    """Routes check grammars before they prepare a request: it may take long, and must hold no thread."""


def _end_process(process: SpawnProcess) -> None:
    process.join(_EXIT_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
