"""`AsyncLLM`: many callers on an event loop, one engine on a thread of its own.

Tokenising and hashing happen on the caller's side, so that a long prompt delays no other stream's next token.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.base_llm import BaseLLM, check_sampling
from evenflow.engine.client import EngineClient
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake
from evenflow.engine.loop import Commands, run_engine
from evenflow.engine.messages import Event, Failed, Refused, SetPolicy, Stepped, Stop
from evenflow.engine.outputs import Delta, RequestOutput, joined
from evenflow.engine.prompts import Conversation, Prompt, read_prompt
from evenflow.engine.watchdog import Watchdog
from evenflow.errors import EngineFailed, EvenflowError

logger = logging.getLogger("evenflow")

_JOIN_S = 0.5


class AsyncLLM(BaseLLM):
    """The engine for servers and other concurrent callers.

        async with AsyncLLM("default") as llm:
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Leaving the `async for`, or cancelling the task, aborts the request. It serves one event loop at a time. Settings
    are those of LLM.
    """

    def _start(self, engine: Engine, intake: Intake) -> None:
        super()._start(engine, intake)
        self._commands: Commands = Commands()
        self._client = EngineClient(intake.codec, self._commands.put)
        self._numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None  # runs the open requests' callers
        self._binding = threading.Lock()
        self._failure: EvenflowError | None = None
        self._is_hung = False
        arguments = (lambda: engine, self._commands, self._deliver)
        self._thread = threading.Thread(target=run_engine, args=arguments, name="evenflow-engine", daemon=True)
        self._thread.start()
        atexit.register(self._end_thread)  # PyTorch could abort a process that exits during a step
        self._watchdog = Watchdog(engine.pulse, self._on_hang, engine.clock)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        tenant: str = "",
        service_class: str | None = None,
        priority: int | None = None,
    ) -> AsyncIterator[Delta]:
        """Stream one output. `tenant`, `service_class` and `priority`: see docs/shares.md."""
        request = await asyncio.to_thread(
            self.prepare,
            prompt,
            sampling_params,
            request_id=request_id,
            tenant=tenant,
            service_class=service_class,
            priority=priority,
        )
        async with aclosing(self.run(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def run(self, request: Request) -> AsyncGenerator[Delta]:
        """Stream the output of a prepared request. Its id may be reused once the stream has ended or was closed."""
        self._check_process()
        if self._failure is not None:
            raise self._failure
        with self._binding:
            self._bind_loop()
            # Late events of an abandoned request must not reach the next one with its id.
            stream = self._client.submit(request, engine_id=f"{request.id}#{next(self._numbers)}")
        try:
            async for delta in stream:
                yield delta
        finally:
            self._client.abort(stream)

    def _bind_loop(self) -> None:
        loop, before = asyncio.get_running_loop(), self._loop
        if before is not None and before is not loop:
            if not before.is_closed() and (before.is_running() or self._client.num_open):
                raise EngineFailed("this AsyncLLM is in use on another event loop: give each loop one of its own")
            self._client.fail_all(EngineFailed("the event loop of this request was closed"))
        self._loop = loop

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        tenant: str = "",
        service_class: str | None = None,
        priority: int | None = None,
    ) -> RequestOutput:
        """One complete output, with `n` answers in `outputs`."""
        content, text = read_prompt(prompt)
        token_ids = await asyncio.to_thread(self._intake.encode, content)
        who: dict[str, Any] = {"tenant": tenant, "service_class": service_class, "priority": priority}
        choices = check_sampling(sampling_params).choices()
        tasks = [asyncio.ensure_future(self._complete(token_ids, one, who)) for one in choices]
        try:
            return joined(await asyncio.gather(*tasks), text)
        finally:
            for task in tasks:  # if one of them has failed
                task.cancel()

    async def _complete(self, token_ids: list[int], sampling: SamplingParams, who: dict[str, Any]) -> RequestOutput:
        output: RequestOutput | None = None
        async for delta in self.stream(token_ids, sampling, **who):
            output = delta.output
        assert output is not None
        return output

    async def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        tenant: str = "",
        service_class: str | None = None,
        priority: int | None = None,
    ) -> RequestOutput:
        """Reply to one conversation, a list of messages, through the model's chat template."""
        prompt = await asyncio.to_thread(self.encode_chat, messages)
        who: dict[str, Any] = {"tenant": tenant, "service_class": service_class, "priority": priority}
        return await self.generate(prompt, sampling_params, **who)

    def _set_policy(self, policy: PolicySpec) -> None:
        self._policy = policy
        self._commands.put(SetPolicy(policy))

    async def close(self) -> None:
        """End every request and the engine's thread, unless the thread hangs. A forked process has none."""
        if not self._is_here:
            return
        await asyncio.to_thread(self._end_thread)
        atexit.unregister(self._end_thread)
        self._watchdog.close()
        self._fail(EngineFailed("the engine was closed"))

    def _end_thread(self) -> None:
        self._commands.put(Stop())
        while self._thread.is_alive() and not self._is_hung:
            self._thread.join(_JOIN_S)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _take(self, event: Event) -> None:
        match event:
            case Stepped() | Refused():
                self._client.take(event)
            case Failed():
                self._fail(event.error())

    def _fail(self, failure: EvenflowError) -> None:
        self._failure = self._failure or failure
        self._client.fail_all(self._failure)

    def _on_hang(self) -> None:
        """A thread cannot be killed: it keeps its memory until the process ends, and this object stops serving."""
        self._is_hung = True
        message = "a step hangs, which this process cannot end: start it again. evenflow's server does so by itself"
        logger.error("The engine has failed: %s.", message)
        self._deliver(Failed("EngineFailed", message))

    def _deliver(self, event: Event) -> None:
        """Runs on the engine's or the watchdog's thread."""
        if isinstance(event, Failed):  # for later callers too
            self._failure = event.error()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and its requests with it
                self._loop.call_soon_threadsafe(self._take, event)
