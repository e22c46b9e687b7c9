"""Sends the response to one generation request, whole or as server-sent events.

A `ResponseWriter` writes the bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import Request
from evenflow.engine.outputs import Delta
from evenflow.errors import EvenflowError
from evenflow.server.api.engine_response import EngineResponse, check
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.response_writer import ResponseWriter
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError, as_api_error

_NO_ROWS = LogprobRows()
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class GenerationResponse(EngineResponse):
    """The response to a chat or a completion."""

    _writer: ResponseWriter[Any]

    def __init__(self, service: ModelService, writer: ResponseWriter[Any], num_bytes: int) -> None:
        super().__init__(service, writer, num_bytes)
        self._has_started = False
        self._is_shown = writer.body.streaming is not None

    async def _respond(self, requests: Sequence[Request], scope: Scope, receive: Receive, send: Send) -> None:
        if (options := self._writer.body.streaming) is None:
            await super()._respond(requests, scope, receive, send)
        else:
            self._submit(requests, scope["path"])
            await self._send_events(scope["path"], send, options)

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
            check(delta)
            if with_usage:
                usage = encode_json(self._usage())
            part = (
                event(index, delta, _NO_ROWS, usage)
                if delta.output.logprobs is None
                else await self._scored(index, delta, usage)
            )
            if first:
                part, first = first + part, b""
            if delta.finish_reason is not None:
                return part
            if part:
                if not self._has_started:
                    await self._start(send)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        return b""

    async def _scored(self, index: int, delta: Delta, usage: bytes) -> bytes:
        """The events for a delta with its logprobs, which are not kept: nobody asks for them again."""
        writer, output = self._writer, delta.output
        rows, output.logprobs = output.logprobs or _NO_ROWS, None
        num_bytes = writer.event_bytes(delta, rows)
        return await self._service.large_work.run(
            num_bytes, writer.caller.client, writer.event, index, delta, rows, usage
        )

    async def _start(self, send: Send) -> None:
        """With the first token: until then, an error can have a status of its own."""
        self._has_started = True
        headers = [*_EVENT_STREAM, *((name.encode(), value.encode()) for name, value in self._writer.headers.items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _run_all(choices: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Run all concurrently; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except* (EvenflowError, ApiError) as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
