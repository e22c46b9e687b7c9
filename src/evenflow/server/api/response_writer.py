"""The common base of chat and completion responses: heads, choices, server-sent events.

`GenerationResponse` decides when to send what these write.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import ALL_LOGPROBS, Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.json_pieces import encode_json, json_pieces
from evenflow.server.api.logprobs import prompt_logprobs
from evenflow.server.api.request_models import GenerationBody, StreamOptions
from evenflow.server.api.request_writer import RequestWriter
from evenflow.server.api.response_size import PROMPT_TOKEN_BYTES, written_bytes
from evenflow.server.api.service import ModelService
from evenflow.server.error_shapes import is_anthropic
from evenflow.server.errors import ApiError

DONE = b"data: [DONE]\n\n"

BodyType = TypeVar("BodyType", bound=GenerationBody)


def event_of(content: bytes) -> bytes:
    return b"data: " + content + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """An event whose type is its name too, as in Anthropic's API and OpenAI's Responses."""
    return f"event: {content['type']}\n".encode() + event_of(encode_json(content))


def failed_stream(error: ApiError, path: str) -> bytes:
    """The end of a stream of this path that fails after it has started."""
    body = error.body(path)
    return named_event(body) if is_anthropic(path) else event_of(encode_json(body)) + DONE


class ResponseWriter(RequestWriter[BodyType]):
    """Writes the response to one HTTP request, whole or as events. The choices of a prompt have adjacent indexes."""

    _DELTA_NAME: ClassVar[bytes]  # of the field that holds an event's content
    _NO_CONTENT: ClassVar[bytes]  # its value if nothing is new
    _CHOICE_BYTES: ClassVar[int] = 512  # of a choice besides its tokens
    _TIMES_STREAMED: ClassVar[int] = 0  # that the end of a stream repeats what was sent

    def __init__(
        self, service: ModelService, body: BodyType, caller: Caller, object_name: str, num_prompts: int = 1
    ) -> None:
        num_choices = num_prompts * body.num_choices
        service.gate.check_num_choices(num_choices)
        body.check_size(num_choices)
        super().__init__(service, body, caller, num_choices)
        self._num_logprobs = body.num_logprobs
        self._sizes = service.token_sizes
        self._returns_token_ids = bool(body.return_token_ids)
        self._head = {
            "id": self._id,
            "object": object_name,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": service.system_fingerprint,
        }
        # Everything before the content is the same in all events of a choice.
        start = b"data: " + encode_json(self._head)[:-1] + b',"choices":[{"index":%d,"' + self._DELTA_NAME + b'":'
        self._event_starts = [start % index for index in range(self.num_choices)]

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [
            {"index": place, **self._choice(index, outputs[index])}
            for place, index in enumerate(self._returned(outputs))
        ]
        return {**self._head, "choices": choices, "usage": usage}

    def _choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        choice = {
            **self._content(index, output),
            "logprobs": self._all_logprobs(index, output),
            "finish_reason": self._finish_reason(index, output.finish_reason),
        }
        if self._returns_token_ids:
            choice["token_ids"] = output.token_ids[: self.num_completion_tokens(output)]
        return choice

    def _all_logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        if self._num_logprobs is None:
            return None
        return self._logprobs(index, output, output.token_ids, output.logprobs or LogprobRows())

    def _returned(self, outputs: Sequence[RequestOutput]) -> Sequence[int]:
        """The indexes of the outputs to return, in order."""
        return range(len(outputs))

    def first_event(self, index: int, usage: bytes) -> bytes:
        """An event to send before the first delta of a choice, if any."""
        return b""

    def event_bytes(self, delta: Delta, rows: LogprobRows) -> int:
        """About the size of the events for a delta, if that is more than some text."""
        return written_bytes(rows)

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        """The events for a delta, with these logprobs of its tokens; empty if nothing is new.

        `usage` is JSON to include, or empty. As with OpenAI, the event with the finish_reason has no content: clients
        may read no further when they see it.
        """
        content, logprobs, is_last = self._delta_content(index, delta), b"null", delta.finish_reason is not None
        token_ids = self._token_ids(index, delta) if self._returns_token_ids else b""
        if self._num_logprobs is not None and delta.token_ids:
            logprobs = b"".join(json_pieces(self._logprobs(index, delta.output, delta.token_ids, rows)))
        elif content == self._NO_CONTENT and not token_ids and (is_last or usage in (b"", b"null")):
            return self._finish_event(index, delta, usage) if is_last else b""
        event = self._write_event(index, content, usage, logprobs, b"null" + token_ids)
        return event + self._finish_event(index, delta, usage) if is_last else event

    def _finish_event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        reason = encode_json(self._finish_reason(index, delta.finish_reason))
        token_ids = b',"token_ids":[]' if self._returns_token_ids else b""
        return self._write_event(index, self._NO_CONTENT, usage, reason=reason + token_ids)

    def last_events(self, options: StreamOptions, usage: dict[str, Any]) -> bytes:
        """What follows the last event of every choice."""
        if not options.include_usage:
            return DONE
        head = encode_json(self._head)[:-1]
        return event_of(head + b',"choices":[],"usage":' + encode_json(usage) + b"}") + DONE

    def failure_events(self, error: ApiError, path: str) -> bytes:
        """The end of a stream that fails after it has started."""
        return failed_stream(error, path)

    def _token_ids(self, index: int, delta: Delta) -> bytes:
        """Further fields of an event's choice: the new tokens."""
        return b',"token_ids":' + encode_json(delta.token_ids)

    @abstractmethod
    def _content(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The field of a choice that holds its whole content."""

    @abstractmethod
    def _delta_content(self, index: int, delta: Delta) -> bytes:
        """The content of an event, as JSON."""

    @abstractmethod
    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: Sequence[int], rows: LogprobRows
    ) -> dict[str, Any]:
        """The logprobs of these last tokens of an output."""

    @abstractmethod
    def _finish_reason(self, index: int, reason: str | None) -> str | None: ...

    # ---- its size ----

    def most_bytes(self, prompt_lengths: Sequence[int], max_tokens: int) -> int:
        """The most that the response can take. A stream keeps nothing that it has sent: its first events count."""
        held = PROMPT_TOKEN_BYTES * self.body.num_choices
        fixed = sum(self._prompt_bytes(length) + held * length for length in prompt_lengths)
        fixed += self.num_choices * self._CHOICE_BYTES + self._repeated_bytes()
        return fixed + max_tokens * self._bytes_per_step()

    def _repeated_bytes(self) -> int:
        """Of the request's settings, if the response repeats them."""
        return 0

    def _bytes_per_step(self) -> int:
        """With a token for each choice."""
        times = self._TIMES_STREAMED if self.body.stream else 1
        return times * self.num_choices * self._token_bytes()

    def _check_size(self, prompt_lengths: Sequence[int], max_tokens: int) -> None:
        size, limit = self.most_bytes(prompt_lengths, max_tokens), self._service.gate.limits.max_response_size
        if size > limit:
            names = ("best_of", "n", "max_tokens", "logprobs", "top_logprobs", "prompt_logprobs", "echo")
            given = [name for name in names if getattr(self.body, name, None)] or ["max_tokens"]
            message = f"The response may take {size} bytes but this server allows {limit}: lower {' or '.join(given)}."
            raise ApiError(400, message, code="response_too_large", param=given[0])

    def _tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """How long each choice of a prompt may get if the client does not say."""
        self._check_size([num_prompt_tokens], 1)
        room = self._service.client.limits.max_model_len - num_prompt_tokens
        if not (per_step := self._bytes_per_step()):
            return room
        left = self._service.gate.limits.max_response_size - self.most_bytes([num_prompt_tokens], 0)
        return min(room, left // per_step)

    @abstractmethod
    def _prompt_bytes(self, num_tokens: int) -> int:
        """The most that a prompt of this length adds to the response, for all of its choices."""

    @abstractmethod
    def _token_bytes(self) -> int:
        """The most that a token of the output adds to a whole response."""

    def _prompt_row_bytes(self) -> int:
        """The most that `prompt_logprobs` take for a token."""
        if (num_top := self.body.prompt_logprobs) is None:
            return 0
        return self._sizes.prompt_row(self._service.client.limits.vocab_size if num_top == ALL_LOGPROBS else num_top)

    # ---- its parts ----

    def _prompt_logprobs(self, output: RequestOutput, num_top: int, num_uses: int = 1) -> object:
        rows = output.prompt_logprobs or ()
        return prompt_logprobs(self._service.tokenizer, rows, num_top, is_shared=num_uses > 1)

    def _write_event(
        self, index: int, content: bytes, usage: bytes, logprobs: bytes = b"null", reason: bytes = b"null"
    ) -> bytes:
        end = b'}],"usage":' + usage + b"}\n\n" if usage else b"}]}\n\n"
        return b"".join(
            (self._event_starts[index], content, b',"logprobs":', logprobs, b',"finish_reason":', reason, end)
        )

    def _requests(self, prompt: list[int], max_tokens: int, first_index: int = 0) -> list[Request]:
        """The requests for all choices of one prompt, numbered from `first_index`."""
        requests = []
        for index in range(first_index, first_index + self.body.num_choices):
            # A prompt is scored once for all its choices. Those of a stream cannot wait for each other.
            scores = index == first_index or bool(self.body.stream)
            sampling = self.body.sampling(
                max_tokens=max_tokens, index=index, grammar=self.grammar, scores_prompt=scores
            )
            requests.append(self._request(prompt, sampling, None if self.num_choices == 1 else index))
        return requests
