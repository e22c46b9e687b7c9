"""The life of a response that the engine computes: through the gate, to the engine, and back whole or as events.

A client that disconnects aborts its requests at once, at any time. The bytes are a `Format`'s.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol, Self, TypeVar, cast

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason
from evenflow.engine.client import Stream
from evenflow.engine.outputs import Delta
from evenflow.errors import EvenflowError
from evenflow.server.access import Caller
from evenflow.server.api.formats import EventFormat, Format
from evenflow.server.api.json_pieces import encode_json, json_pieces
from evenflow.server.api.request_body import make_of_body
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.api.response_size import event_bytes, held_bytes, written_bytes
from evenflow.server.api.service import ModelService
from evenflow.server.engine.model_switch import Hold
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.errors import ApiError, as_api_error

_WRITTEN_AT_ONCE = 1 << 18  # bytes of outputs in memory: writing them takes a millisecond
_NO_ROWS = LogprobRows()
_EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class NamesModel(Protocol):
    """A body that names its model."""

    @property
    def model(self) -> str | None: ...


BodyType = TypeVar("BodyType", bound=BaseModel)
Result = TypeVar("Result")
MakeFormat = Callable[[ModelService, BodyType, Caller], Format]


class EngineResponse(Response):
    """Submits its requests only when it is sent, so a response that is never sent holds nothing.

    It holds room for the job's `num_choices`, and as many run or wait at a time. `streaming` says how to send events,
    which the format must then have; None: whole. `hold`: of its model, if it had to wait for that.
    """

    def __init__(
        self,
        form: Format,
        question: bytes | None,
        num_bytes: int,
        streaming: StreamOptions | None = None,
        hold: Hold | None = None,
    ) -> None:
        super().__init__()
        self._hold = hold
        if hold is not None:
            weakref.finalize(self, hold.release)  # of a response that is never sent
        self._format = form
        self._question = question  # for the chat template
        self._job = form.job
        self._service = form.job.service
        self._num_bytes = num_bytes  # of the body
        self._streaming = streaming
        self._streams: list[Stream] = []
        self._has_started = False

    @classmethod
    async def to(
        cls, request: HttpRequest, service: ModelService, body_type: type[BodyType], make: MakeFormat[BodyType]
    ) -> Self:
        """The response to an HTTP request with such a body."""

        def make_format(chosen: ModelService, body: BodyType) -> tuple[Format, bytes | None]:
            return with_question(make(chosen, body, request.state.caller))

        (form, question), num_bytes, hold = await make_for_model(request, service, body_type, make_format)
        return cls(form, question, num_bytes, form.job.body.streaming, hold)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job, service = self._job, self._service
        with (
            self._hold or nullcontext(),  # released also if the gate refuses
            service.gate.enter(job.share, job.num_choices, job.service_class) as room,
            self._hold or await service.switch.hold(service.model),
        ):
            if job.grammar is not None:
                await service.grammar_gate.check(job.grammar, job.caller.client)
            requests = deque(await self._prepare())
            room.take_tokens(sum(prepared.request.max_known_tokens for prepared in requests))
            scope["state"]["connection"].app_bytes = self._held_bytes
            watch = asyncio.create_task(self._abort_on_disconnect(receive))
            try:
                await self._respond(requests, scope, receive, send)
            finally:
                watch.cancel()
                self._abort()

    async def _prepare(self) -> list[Prepared]:
        client, rendered = self._job.caller.client, ""
        if self._question is not None:
            rendered, self._question = await self._service.templates.render(self._question, client), None
        return await self._service.large_work.run_on_thread(self._num_bytes, client, self._format.prepare, rendered)

    async def _respond(self, requests: deque[Prepared], scope: Scope, receive: Receive, send: Send) -> None:
        if self._streaming is not None:
            self._submit(requests, scope["path"])
            await self._send_events(scope["path"], send, self._streaming)
            return
        while requests:
            first = len(self._streams)
            self._submit(requests, scope["path"])
            for stream in self._streams[first:]:
                async for delta in stream:
                    check(delta)
                if stream.output.finish_reason == FinishReason.ABORT:
                    return  # the client is gone
        await self._send_whole(scope, receive, send)

    def _submit(self, requests: deque[Prepared], path: str) -> None:
        """The next ones, which are not kept: the engine has them."""
        job = self._job
        names = {"tenant": job.tenant, "endpoint": path, "model": job.model}
        num_choices: int | None = min(job.num_choices, len(requests))
        for _ in range(min(job.num_choices, len(requests))):
            stream = self._service.client.submit(
                requests.popleft(),
                caller=job.caller,
                num_choices=num_choices,
                is_shown=self._streaming is not None,
                **names,
            )
            self._streams.append(stream)
            num_choices = None

    async def _abort_on_disconnect(self, receive: Receive) -> None:
        await client_disconnected(receive)
        self._abort()

    def _abort(self) -> None:
        for stream in self._streams:
            self._service.client.abort(stream)

    def _held_bytes(self) -> int:
        return held_bytes(stream.output for stream in self._streams)

    def _usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt's tokens count once, however many choices it has."""
        by_prompt = [stream.output for stream in self._streams[:: self._job.body.num_choices]]
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in by_prompt)
        num_tokens = sum(len(stream.output.token_ids) for stream in self._streams) if self._job.shows_output else 0
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in by_prompt)},
        }

    # ---- whole ----

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A long one in pieces, each made on a thread when the client has read those before it."""
        form, job, work = self._format, self._job, self._service.large_work
        outputs, usage = [stream.output for stream in self._streams], self._usage()
        num_bytes = held_bytes(outputs) + sum(written_bytes(one.logprobs, one.prompt_logprobs) for one in outputs)
        if num_bytes <= _WRITTEN_AT_ONCE:
            body = encode_json(form.response(outputs, usage))
            await Response(body, headers=job.headers, media_type="application/json")(scope, receive, send)
            return
        response = await work.run(num_bytes, job.caller.client, form.response, outputs, usage)
        pieces = json_pieces(response)
        await self._start(send, {"content-type": "application/json"})
        while piece := await work.run(num_bytes, job.caller.client, next, pieces, b""):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send, headers: dict[str, str]) -> None:
        self._has_started = True
        headers = headers | self._job.headers
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})

    # ---- as events ----

    async def _send_events(self, path: str, send: Send, options: StreamOptions) -> None:
        form = cast("EventFormat", self._format)
        try:
            if len(self._streams) == 1:
                last = await self._send_choice(0, send, options, form)
            else:
                choices = [self._send_choice(index, send, options, form) for index in range(len(self._streams))]
                last = b"".join(await _run_all(choices))
            last += form.last_events(options, self._usage())
        except (EvenflowError, ApiError) as error:
            if not self._has_started:  # the status can still say it
                raise
            last = form.failure_events(as_api_error(error), path)
        if not self._has_started:
            await self._start(send, _EVENT_STREAM)
        await send({"type": "http.response.body", "body": last})

    async def _send_choice(self, index: int, send: Send, options: StreamOptions, form: EventFormat) -> bytes:
        """Send one choice except its last event, which is returned to be sent together with what follows.

        The head goes with the first token: until then, an error can have a status of its own.
        """
        event, with_usage = form.event, options.continuous_usage_stats
        usage = b"null" if options.include_usage else b""
        async for delta in self._streams[index]:
            is_last = delta.finish_reason is not None
            if is_last:
                check(delta)
            if with_usage:
                usage = encode_json(self._usage())
            if delta.output.logprobs is None:
                part = event(index, delta, _NO_ROWS, usage)
            else:
                part = await self._scored(form, index, delta, usage)
            if is_last:
                return part
            if part:
                if not self._has_started:
                    await self._start(send, _EVENT_STREAM)
                await send({"type": "http.response.body", "body": part, "more_body": True})
        return b""

    async def _scored(self, form: EventFormat, index: int, delta: Delta, usage: bytes) -> bytes:
        """The events for a delta with its logprobs, which are not kept: nobody asks for them again."""
        rows, delta.output.logprobs = delta.output.logprobs or _NO_ROWS, None
        num_bytes, client = event_bytes(delta, rows), self._job.caller.client
        return await self._service.large_work.run(num_bytes, client, form.event, index, delta, rows, usage)


async def make_for_model(
    request: HttpRequest,
    service: ModelService,
    body_type: type[BodyType],
    make: Callable[[ModelService, BodyType], Result],
) -> tuple[Result, int, Hold | None]:
    """What `make` makes of a body for the model that it names, its size, and the model's hold if the request waited.

    In the job that parses the body, unless the model has to be loaded first.
    """

    def attempt(body: BodyType) -> Result | BodyType:
        chosen = service.serving(cast("NamesModel", body).model)
        return make(chosen, body) if chosen.is_free else body

    made, num_bytes = await make_of_body(request, service, body_type, attempt)
    if not isinstance(made, body_type):
        return cast("Result", made), num_bytes, None
    chosen = service.serving(cast("NamesModel", made).model)
    found, hold = await make_loaded(chosen, request.state.caller, num_bytes, partial(make, chosen, made))
    return found, num_bytes, hold


async def make_loaded(
    service: ModelService, caller: Caller, num_bytes: int, make: Callable[[], Result]
) -> tuple[Result, Hold | None]:
    """What `make` makes once the model is loaded, and the model's hold if it had to be waited for."""
    hold = None if service.is_free else await service.hold(caller)
    try:
        return await service.large_work.run(num_bytes, caller.client, make), hold
    except BaseException:
        if hold is not None:
            hold.release()
        raise


def with_question(form: Format) -> tuple[Format, bytes | None]:
    """A format and what it asks the chat template: both take long for large bodies, so one job makes them."""
    return form, form.template_question()


async def _run_all(choices: Sequence[Coroutine[Any, Any, bytes]]) -> list[bytes]:
    """Run all concurrently; the first failure cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(choice) for choice in choices]
    except* (EvenflowError, ApiError) as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def client_disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def check(delta: Delta) -> None:
    """Raise what made a request fail."""
    if delta.finish_reason == FinishReason.ERROR:
        raise ApiError(500, f"The request failed: {delta.output.error}.", kind="server_error")
