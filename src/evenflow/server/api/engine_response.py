"""Sends a response that the engine computes: submits its requests, waits for them, writes it whole.

A client that disconnects aborts its requests at once, at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evenflow.core.request import FinishReason, Request
from evenflow.engine.client import Stream
from evenflow.engine.outputs import Delta
from evenflow.server.access import Caller
from evenflow.server.api.json_pieces import encode_json, json_pieces
from evenflow.server.api.large_work import SMALL_BYTES
from evenflow.server.api.request_body import read_body
from evenflow.server.api.request_writer import RequestWriter
from evenflow.server.api.response_size import held_bytes, written_bytes
from evenflow.server.api.service import ModelService
from evenflow.server.errors import ApiError

_WRITTEN_AT_ONCE = 1 << 18  # bytes of outputs in memory: writing them takes a millisecond

BodyType = TypeVar("BodyType", bound=BaseModel)
MakeWriter = Callable[[ModelService, BodyType, Caller], RequestWriter[Any]]


class EngineResponse(Response):
    """Submits its requests only when it is sent, so a response that is never sent holds nothing.

    It holds room for `num_choices` of them, and as many run or wait at a time.
    """

    _is_shown = False  # token by token

    def __init__(self, service: ModelService, writer: RequestWriter[Any], num_bytes: int) -> None:
        super().__init__()
        self._service = service
        self._writer = writer
        self._num_bytes = num_bytes  # of the body
        self._streams: list[Stream] = []

    @classmethod
    async def to(
        cls, request: HttpRequest, service: ModelService, body_type: type[BodyType], writer_type: MakeWriter[BodyType]
    ) -> Self:
        """The response to an HTTP request with such a body."""
        body, num_bytes = await read_body(request, body_type, service.gate.limits.max_body_bytes, service.large_work)
        caller = request.state.caller
        writer = await service.large_work.run(num_bytes, caller.client, writer_type, service, body, caller)
        return cls(service, writer, num_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = self._writer
        with self._service.gate.enter(writer.share, writer.num_choices, writer.service_class) as room:
            if writer.grammar is not None:
                await self._service.grammar_gate.check(writer.grammar, writer.caller.client)
            requests = await self._prepare()
            room.take_tokens(sum(request.max_known_tokens for request in requests))
            scope["state"]["connection"].app_bytes = self._held_bytes
            watch = asyncio.create_task(self._abort_on_disconnect(receive))
            try:
                await self._respond(requests, scope, receive, send)
            finally:
                watch.cancel()
                self._abort()

    async def _respond(self, requests: Sequence[Request], scope: Scope, receive: Receive, send: Send) -> None:
        for first in range(0, len(requests), self._writer.num_choices):
            self._submit(requests[first : first + self._writer.num_choices], scope["path"])
            for stream in self._streams[first:]:
                async for delta in stream:
                    check(delta)
            if any(stream.output.finish_reason == FinishReason.ABORT for stream in self._streams[first:]):
                return  # the client is gone
        await self._send_whole(scope, receive, send)

    def _held_bytes(self) -> int:
        return held_bytes(stream.output for stream in self._streams)

    async def _prepare(self) -> list[Request]:
        writer, service, client = self._writer, self._service, self._writer.caller.client
        question = await service.large_work.run(self._num_bytes, client, writer.template_question)
        rendered = "" if question is None else await service.templates.render(question, client)
        if self._num_bytes <= SMALL_BYTES:  # still too long for the event loop, if all of it is text
            return await asyncio.to_thread(writer.prepare, rendered)
        return await service.large_work.run(self._num_bytes, client, writer.prepare, rendered)

    def _submit(self, requests: Sequence[Request], path: str) -> None:
        writer, client = self._writer, self._service.client
        names = {"tenant": writer.tenant, "endpoint": path, "model": writer.model}
        for index, request in enumerate(requests):
            num_choices = None if index else len(requests)
            sent = client.submit(
                request, caller=writer.caller, num_choices=num_choices, is_shown=self._is_shown, **names
            )
            self._streams.append(sent)

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        await client_disconnected(receive)
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            self._service.client.abort(stream)

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A long one in pieces, each made on a thread when the client has read those before it."""
        writer, work, client = self._writer, self._service.large_work, self._writer.caller.client
        outputs, usage = [stream.output for stream in self._streams], self._usage()
        num_bytes = held_bytes(outputs) + sum(written_bytes(one.logprobs, one.prompt_logprobs) for one in outputs)
        if num_bytes <= _WRITTEN_AT_ONCE:
            body = encode_json(writer.response(outputs, usage))
            await Response(body, headers=writer.headers, media_type="application/json")(scope, receive, send)
            return
        response = await work.run(num_bytes, client, writer.response, outputs, usage)
        pieces = json_pieces(response)
        head = Response(headers=writer.headers | {"Content-Type": "application/json"}).raw_headers
        headers = [header for header in head if header[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while piece := await work.run(num_bytes, client, next, pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

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


async def client_disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check(delta: Delta) -> None:
    """Raise what made a request fail."""
    if delta.finish_reason == FinishReason.ERROR:
        raise ApiError(500, f"The request failed: {delta.output.error}.", kind="server_error")
