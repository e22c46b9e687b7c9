"""`AsyncLLM`: many callers on an event loop, one engine on a thread of its own.

The thread owns the engine; callers send it commands and get back deltas through the loop. Tokenising and hashing
happen on the caller's side, so that a long prompt delays nobody's next token.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from evenflow.core.policies import retarget
from evenflow.core.request import Request, SamplingParams
from evenflow.engine.build import build_engine
from evenflow.engine.engine import Engine
from evenflow.engine.llm import GREEDY, Conversation, Prompt, encode_chat, make_config
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import EngineFailed, EvenflowError


@dataclass(frozen=True, slots=True)
class _Add:
    request: Request
    stream: _Stream


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _SetPolicy:
    policy: str
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class _SetTarget:
    seconds: float
    paced: bool


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class _Stream:
    """The way back to one caller, from the engine's thread into the caller's loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.items: asyncio.Queue[Delta | EvenflowError] = asyncio.Queue()

    def send(self, item: Delta | EvenflowError) -> None:
        with suppress(RuntimeError):  # the caller's loop may be closed: then nobody is left to tell
            self.loop.call_soon_threadsafe(self.items.put_nowait, item)


class AsyncLLM:
    """The engine for servers and other concurrent callers.

        async with AsyncLLM("default") as llm:
            async for delta in llm.stream("Once upon a time"):
                print(delta.text, end="")

    Leaving the `async for`, or cancelling the task, aborts the request. The knobs are those of LLM.
    """

    def __init__(self, model: str | Path = "default", *, record: str | Path | None = None, **knobs: Any) -> None:
        self.config = make_config(model, knobs)
        built = build_engine(self.config, record)
        self.tokenizer = built.tokenizer
        self.policy = built.policy
        self._start(built.engine)

    @classmethod
    def over(cls, engine: Engine) -> AsyncLLM:
        """Around an engine that exists already, such as one with a fake executor."""
        llm = cls.__new__(cls)
        llm.policy = engine.scheduler.config.policy
        llm._start(engine)
        return llm

    def _start(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[_Add | _Abort | _SetPolicy | _SetTarget | _Stop] = queue.SimpleQueue()
        self._failure: EvenflowError | None = None
        self._thread = threading.Thread(target=self._serve, name="evenflow-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> AsyncIterator[Delta]:
        """One answer as it comes."""
        request = await asyncio.to_thread(self.prepare, prompt, sampling_params, request_id=request_id, tenant=tenant)
        async with aclosing(self.run(request)) as deltas:
            async for delta in deltas:
                yield delta

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        tenant: str = "",
    ) -> Request:
        """Check and tokenise a request without running it; it arrives now. Any thread may do this."""
        return self._engine.prepare(prompt, sampling_params, request_id=request_id, tenant=tenant)

    async def run(self, request: Request) -> AsyncGenerator[Delta]:
        """The answer to a prepared request, which joins the line at once."""
        if self._failure is not None:
            raise self._failure
        stream = _Stream()
        self._commands.put(_Add(request, stream))
        finished = False
        try:
            while not finished:
                item = await stream.items.get()
                if isinstance(item, EvenflowError):
                    finished = True
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            if not finished:
                self._commands.put(_Abort(request.id))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams = GREEDY, *, tenant: str = ""
    ) -> RequestOutput:
        """One whole answer."""
        output: RequestOutput | None = None
        async for delta in self.stream(prompt, sampling_params, tenant=tenant):
            output = delta.output
        assert output is not None
        return output

    def encode_chat(self, messages: Conversation) -> list[int]:
        """The token ids of a conversation, up to where the answer begins."""
        return encode_chat(self.tokenizer, messages)

    def set_policy(self, policy: str) -> None:
        """Plan by another policy from the next step on; the model, its KV cache and the requests stay."""
        self.policy, budget = self.config.with_policy(policy).resolve_policy(self._engine.limits.max_model_len)
        self._commands.put(_SetPolicy(self.policy, budget))

    def set_target(self, seconds: float, paced: bool | None = None) -> None:
        """Keep another target from the next step on; None: paced or strict as before. What was learned stays."""
        self.policy = retarget(self.policy, seconds, paced)
        self._commands.put(_SetTarget(seconds, self.policy.endswith(",paced")))

    async def close(self) -> None:
        """End every request and the engine's thread."""
        self._commands.put(_Stop())
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- on the engine's thread ----

    def _serve(self) -> None:
        streams: dict[str, _Stream] = {}
        reason = EngineFailed("the engine was closed")
        try:
            while self._obey(streams):
                for delta in self._engine.step():
                    stream = streams[delta.request_id]
                    if delta.finish_reason is not None:
                        del streams[delta.request_id]
                    stream.send(delta)
        except Exception as error:  # a defect of the engine: every caller hears of it
            reason = error if isinstance(error, EngineFailed) else EngineFailed(f"the engine stopped: {error!r}")
        finally:
            self._failure = reason
            for stream in streams.values():
                stream.send(reason)
            self._refuse_the_rest(reason)
            self._engine.close()

    def _obey(self, streams: dict[str, _Stream]) -> bool:
        """Take in all commands, waiting for one where there is nothing to do. False: stop."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            match command:
                case _Add(request, stream):
                    try:
                        self._engine.add(request)
                        streams[request.id] = stream
                    except EvenflowError as error:
                        stream.send(error)
                case _Abort(request_id):
                    self._engine.abort(request_id)
                    streams.pop(request_id, None)
                case _SetPolicy(policy, max_num_batched_tokens):
                    self._engine.set_policy(policy, max_num_batched_tokens)
                case _SetTarget(seconds, paced):
                    self._engine.set_target(seconds, paced)
                case _Stop():
                    return False

    def _refuse_the_rest(self, reason: EvenflowError) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Add):
                command.stream.send(reason)
