"""What a format is: an object that turns one HTTP request into engine requests, and their outputs into a response.

`EngineResponse` owns one and decides when to call it. Here is also what their server-sent events have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from evenflow.core.logprobs import LogprobRows
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.api.job import Job
from evenflow.server.api.json_pieces import encode_json
from evenflow.server.api.request_models import StreamOptions
from evenflow.server.engine.served_engine import Prepared
from evenflow.server.error_shapes import is_anthropic
from evenflow.server.errors import ApiError

DONE = b"data: [DONE]\n\n"


class Format(Protocol):
    """Writes whole responses."""

    job: Job

    def template_question(self) -> bytes | None:
        """What to ask the template renderer first, if anything."""

    def prepare(self, rendered: str) -> list[Prepared]:
        """One engine request per choice. Tokenising takes long for long prompts: call it in a thread."""

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]: ...


class EventFormat(Format, Protocol):
    """Writes events too. The choices of a prompt have adjacent indexes."""

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        """What a delta adds to the stream, with these logprobs of its tokens; `usage` is JSON to include, or empty.

        The first event comes with the first token: clients take its time for the time to first token.
        """

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        """After the last event of every choice."""

    def failure_events(self, error: ApiError, path: str) -> bytes:
        """The end of a stream that fails after it has started."""


def event_of(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """An event whose type is its name too, as in Anthropic's API and OpenAI's Responses."""
    return f"event: {content['type']}\n".encode() + event_of(encode_json(content))


def failed_stream(error: ApiError, path: str) -> bytes:
    """The end of a stream of this path that fails after it has started."""
    body = error.body(path)
    return named_event(body) if is_anthropic(path) else event_of(encode_json(body)) + DONE
