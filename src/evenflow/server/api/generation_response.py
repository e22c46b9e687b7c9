"""One HTTP request for answers, from the gate to its last byte: whole, or as server-sent events.

What the bytes say is up to an AnswerFormat. A client that goes away ends its requests at once, at any moment.
Must not know: what a chat or a completion is, how the engine is reached.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evenflow.core.request import FinishReason, Request
from evenflow.engine.client import Stream
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import EvenflowError
from evenflow.server.api.errors import ApiError, as_api_error
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.service import Service

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DONE = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


class AnswerFormat(Protocol):
    """What an endpoint's answers look like. Answers are numbered: those to a prompt are neighbours."""

    @property
    def num_answers(self) -> int: ...

    @property
    def num_answers_per_prompt(self) -> int: ...

    @property
    def stream_options(self) -> StreamOptions | None:
        """None: the answer comes whole."""
        ...

    def prepare(self) -> list[Request]:
        """The requests, one an answer. Takes long for long prompts: for a thread of its own."""
        ...

    def opening(self, index: int) -> bytes:
        """The event before an answer's first, if there is one."""
        ...

    def event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        """The event of a delta, or nothing where it says nothing; `usage` is JSON to put in, if any."""
        ...

    def usage_event(self, usage: bytes) -> bytes: ...

    def num_completion_tokens(self, output: RequestOutput) -> int: ...

    def whole(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]: ...


def new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"


def event_of(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


class Answering(Response):
    """Runs one request when it is sent, so that nothing is held by an answer that is never sent."""

    def __init__(self, service: Service, answer: AnswerFormat, *, tenant: str, salt: str) -> None:
        super().__init__()
        self._service = service
        self._format = answer
        self._tenant = tenant  # as figures know it
        self._salt = salt  # as the gate and the prefix cache know it
        self._streams: list[Stream] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._service.gate.enter(self._salt, self._format.num_answers):
            requests = await asyncio.to_thread(self._format.prepare)
            async with self._submitted(requests, receive):
                if self._format.stream_options is None:
                    await self._send_whole(send)
                else:
                    await self._send_events(send, self._format.stream_options)

    @asynccontextmanager
    async def _submitted(self, requests: list[Request], receive: Receive) -> AsyncIterator[None]:
        """The requests at work in the engine, until this ends or the client goes away."""
        client = self._service.client
        try:
            for index, request in enumerate(requests):
                num_answers = None if index else len(requests)
                self._streams.append(client.submit(request, tenant=self._tenant, num_answers=num_answers))
            watch = asyncio.create_task(self._abort_on_disconnect(receive))
            try:
                yield
            finally:
                watch.cancel()
        finally:
            self._abort()

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            self._service.client.abort(stream)

    # ---- whole ----

    async def _send_whole(self, send: Send) -> None:
        for stream in self._streams:
            async for delta in stream:
                _check(delta)
        outputs = [stream.output for stream in self._streams]
        if any(output.finish_reason == FinishReason.ABORT for output in outputs):
            return  # nobody is there to read it
        body = encode_json(self._format.whole(outputs, self._usage()))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. The prompts' are counted once, however many answers each has."""
        first_answers = [stream.output for stream in self._streams[:: self._format.num_answers_per_prompt]]
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in first_answers)
        num_tokens = sum(self._format.num_completion_tokens(stream.output) for stream in self._streams)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in first_answers)},
        }

    # ---- as events ----

    async def _send_events(self, send: Send, options: StreamOptions) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_STREAM})
        last = b""
        try:
            if len(self._streams) == 1:
                last = await self._send_answer(0, send, options)
            else:
                answers = [self._send_answer(index, send, options) for index in range(len(self._streams))]
                last = b"".join(await _all(answers))
            if options.include_usage:
                last += self._format.usage_event(encode_json(self._usage()))
        except EvenflowError as error:
            last = event_of(encode_json(as_api_error(error).body()))
        except ApiError as error:
            last = event_of(encode_json(error.body()))
        await send({"type": "http.response.body", "body": last + DONE})

    async def _send_answer(self, index: int, send: Send, options: StreamOptions) -> bytes:
        """Send one answer but for its last event, which is returned so that more can go with it."""
        event, shows_usage, null_usage = self._format.event, options.continuous_usage_stats, options.include_usage
        usage = b"null" if null_usage else b""
        # It goes with the first token: clients take the time of the first event for that of the first token.
        opening = self._format.opening(index)
        async for delta in self._streams[index]:
            _check(delta)
            if shows_usage:
                usage = encode_json(self._usage())
            part = event(index, delta, usage)
            if opening:
                part, opening = opening + part, b""
            if delta.finish_reason is not None:
                return part
            if part:
                await _send_part(send, part)
        return b""


async def _send_part(send: Send, part: bytes) -> None:
    await send({"type": "http.response.body", "body": part, "more_body": True})


async def _all(answers: Sequence[Any]) -> list[bytes]:
    """Run all; the first that fails ends the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(answer) for answer in answers]
    except* (EvenflowError, ApiError) as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _check(delta: Delta) -> None:
    """A request that failed while it ran has no answer."""
    if delta.finish_reason == FinishReason.ERROR:
        raise ApiError(500, f"The request failed: {delta.output.error}.", kind="server_error")
