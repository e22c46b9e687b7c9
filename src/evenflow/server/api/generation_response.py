"""Sends the response to one generation request, whole or as server-sent events.

A `ResponseWriter` writes the bytes. A client that disconnects aborts its requests at once, at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evenflow.core.request import FinishReason, Request
from evenflow.engine.client import Stream
from evenflow.engine.outputs import Delta
from evenflow.errors import EvenflowError
from evenflow.server.api.large_work import SMALL_BYTES
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.response_writer import ResponseWriter, encode_json
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError, as_api_error

_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationResponse(Response):
    """Submits its requests only when it is sent, so a response that is never sent holds nothing."""

    def __init__(self, service: ModelService, writer: ResponseWriter[Any], num_bytes: int) -> None:
        super().__init__()
        self._service = service
        self._writer = writer
        self._num_bytes = num_bytes  # of the body
        self._streams: list[Stream] = []
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer, client = self._writer, self._service.client
        with self._service.gate.enter(writer.caller.limited_as(writer.tenant), writer.num_choices):
            if writer.grammar is not None:
                await self._service.grammar_gate.check(writer.grammar, writer.caller.client)
            requests = await self._prepare()
            watch = asyncio.create_task(self._abort_on_disconnect(receive))
            try:
                names = {"tenant": writer.tenant, "endpoint": scope["path"], "model": writer.model}
                for index, request in enumerate(requests):
                    num_choices = None if index else len(requests)
                    self._streams.append(client.submit(request, caller=writer.caller, num_choices=num_choices, **names))
                if (options := writer.body.streaming) is None:
                    await self._send_whole(scope, receive, send)
                else:
                    await self._send_events(scope["path"], send, options)
            finally:
                watch.cancel()
                self._abort()

    async def _prepare(self) -> list[Request]:
        writer, service, client = self._writer, self._service, self._writer.caller.client
        question = await service.large_work.run(self._num_bytes, client, writer.template_question)
        rendered = "" if question is None else await service.templates.render(question, client)
        if self._num_bytes <= SMALL_BYTES:  # still too long for the event loop, if all of it is text
            return await asyncio.to_thread(writer.prepare, rendered)
        return await service.large_work.run(self._num_bytes, client, writer.prepare, rendered)

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        await client_disconnected(receive)
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            self._service.client.abort(stream)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        for stream in self._streams:
            async for delta in stream:
                _check(delta)
        outputs = [stream.output for stream in self._streams]
        if any(output.finish_reason == FinishReason.ABORT for output in outputs):
            return  # the client is gone
        if self._writer.body.prompt_logprobs:  # thousands of them take long to write
            body = await asyncio.to_thread(self._whole_body)
        else:
            body = self._whole_body()
        await Response(body, headers=self._writer.headers, media_type="application/json")(scope, receive, send)

    def _whole_body(self) -> bytes:
        outputs = [stream.output for stream in self._streams]
        return encode_json(self._writer.response(outputs, self._usage()))

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt's tokens count once, however many choices it has."""
        by_prompt = [stream.output for stream in self._streams[:: self._writer.body.num_choices]]
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in by_prompt)
        num_tokens = sum(self._writer.num_completion_tokens(stream.output) for stream in self._streams)
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in by_prompt)},
        }

    async def _send_events(self, path: str, send: Send, options: StreamOptions) -> None:
        try:
            if len(self._streams) == 1:
                last = await self._send_choice(0, send, options)
            else:
                choices = [self._send_choice(index, send, options) for index in range(len(self._streams))]
                last = b"".join(await _run_all(choices))
            last += self._writer.last_events(options, self._usage())
        except (EvenflowError, ApiError) as error:
            if not self._has_started:  # the status can still say it
                raise
            last = self._writer.failure_events(as_api_error(error), path)
        if not self._has_started:
            await self._start(send)
        await send({"type": "http.response.body", "body": last})

    async def _send_choice(self, index: int, send: Send, options: StreamOptions) -> bytes:
        """Send one choice except its last event, which is returned to be sent together with what follows."""
        event, with_usage = self._writer.event, options.continuous_usage_stats
        usage = b"null" if options.include_usage else b""
        # Sent with the first token: clients take the time of the first event for the time to first token.
        first = self._writer.first_event(index, usage)
        async for delta in self._streams[index]:
            _check(delta)
            if with_usage:
                usage = encode_json(self._usage())
            part = event(index, delta, usage)
            if first:
                part, first = first + part, b""
            if delta.finish_reason is not None:
                return part
            if part:
                if not self._has_started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        return b""

    async def _start(self, send: Send) -> None:
        """With the first token: until then, an error can have a status of its own."""
        self._has_started = True
        headers = [*_EVENT_STREAM, *((name.encode(), value.encode()) for name, value in self._writer.headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def client_disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _run_all(choices: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Run all concurrently; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except* (EvenflowError, ApiError) as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _check(delta: Delta) -> None:
    if delta.finish_reason == FinishReason.ERROR:
        raise ApiError(500, f"The request failed: {delta.output.error}.", kind="server_error")
