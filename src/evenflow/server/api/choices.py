"""OpenAI's envelope of chats and completions: heads, choices, server-sent events."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from evenflow.server.api.formats import DONE, event_of
from evenflow.server.api.job import Job
from evenflow.server.api.json_pieces import encode_json, json_pieces
from evenflow.server.api.request_models import StreamOptions


class Choices:
    """Writes the choices of one job.

    An event's content is the field `name`, with `nothing` if there is none; a text is the value of `text_name` in it,
    or the content itself.
    """

    def __init__(self, job: Job, kind: str, name: bytes, nothing: bytes, text_name: bytes = b"") -> None:
        self._head = {
            "id": job.id,
            "object": kind,
            "created": int(time.time()),
            "model": job.model,
            "system_fingerprint": job.service.system_fingerprint,
        }
        self._nothing = nothing
        # Everything before the content is the same in all events of a choice.
        start = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":%d,"' + name + b'":'
        self._starts = [start % index for index in range(job.num_choices)]
        before, after = (b'{"' + text_name + b'":', b"}") if text_name else (b"", b"")
        self._text_starts = [start + before for start in self._starts]
        self._text_end = after + b',"logprobs":null,"finish_reason":null}]}\n\n'

    def whole(self, choices: Iterable[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        numbered = [{"index": place, **choice} for place, choice in enumerate(choices)]
        return {**self._head, "choices": numbered, "usage": usage}

    def text_event(self, index: int, text: str, usage: bytes) -> bytes:
        """For some text and nothing else: nearly every token."""
        end = self._text_end if not usage else self._text_end[:-3] + b',"usage":' + usage + b"}\n\n"
        return self._text_starts[index] + encode_json(text) + end

    def events(
        self,
        index: int,
        content: bytes,
        usage: bytes,
        *,
        reason: str | None,
        logprobs: object = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
    ) -> bytes:
        """The events for what a step added; empty if nothing is new.

        `usage` is JSON to include, or empty. As with OpenAI, the event with the finish_reason has no content: clients
        may read no further when they see it.
        """
        fields = b"" if token_ids is None else b',"token_ids":' + encode_json(token_ids)
        if prompt_token_ids is not None:
            fields += b',"prompt_token_ids":' + encode_json(prompt_token_ids)
        shows_usage = reason is None and usage not in (b"", b"null")
        event = b""
        if content != self._nothing or logprobs is not None or fields or shows_usage:
            event = self.event(index, content, usage, b"".join(json_pieces(logprobs)), b"null" + fields)
        if reason is None:
            return event
        no_token_ids = b',"token_ids":[]' if token_ids is not None else b""
        return event + self.event(index, self._nothing, usage, reason=encode_json(reason) + no_token_ids)

    def event(
        self, index: int, content: bytes, usage: bytes, logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        end = b'}],"usage":' + usage + b"}\n\n" if usage else b"}]}\n\n"
        return b"".join((self._starts[index], content, b',"logprobs":', logprobs, b',"finish_reason":', reason, end))

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        """After the last event of every choice."""
        if not options.include_usage:
            return DONE
        head = encode_json(self._head)[:-1]
        return event_of(head + b',"choices":[],"usage":' + encode_json(usage) + b"}") + DONE
