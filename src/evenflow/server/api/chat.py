"""POST /v1/chat/completions: a conversation through the model's chat template, and the assistant's next turn.

Must not know: how answers reach the client.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evenflow.core.request import FinishReason, Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.model.chat_template import ToolStyle
from evenflow.model.tokenizer import Tokenizer
from evenflow.server.api.generation_response import encode_json, event_of, new_id
from evenflow.server.api.logprobs import chat_logprobs, prompt_logprobs
from evenflow.server.api.request_models import ChatBody, ChatMessage, StreamOptions
from evenflow.server.api.service import Service
from evenflow.server.api.tool_stream import Content, Event, as_delta, whole_message


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation, by default up to where the answer begins."""
    variables = variables or {}
    for name in ("self", "messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(f"Got {name!r} in chat_template_kwargs but it has a field of its own.")
    text = tokenizer.apply_chat_template(
        [message.for_template() for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt is not False,
        **variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


class ChatFormat:
    """One request to /v1/chat/completions."""

    def __init__(self, service: Service, body: ChatBody, salt: str) -> None:
        self._service = service
        self._body = body
        self._salt = salt
        service.gate.check_num_answers(self.num_answers)
        self._id = new_id("chatcmpl")
        self._head = {
            "id": self._id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.model_name(body.model),
        }
        self._num_top_logprobs = body.top_logprobs or 0
        template = service.tokenizer.chat_template
        self._tool_use = body.tool_use(template.tool_style if template else ToolStyle.HERMES, body.grammar)
        self._tool_streams = [self._tool_use.new_stream() for _ in range(self.num_answers)]
        # All of an event up to its text is the same for every token of an answer.
        head = encode_json(self._head)[:-1]
        self._event_starts = [
            b"data: " + head + b',"choices":[{"index":%d,"delta":{' % index for index in range(self.num_answers)
        ]

    @property
    def num_answers(self) -> int:
        return self._body.num_answers

    @property
    def num_answers_per_prompt(self) -> int:
        return self._body.num_answers

    @property
    def stream_options(self) -> StreamOptions | None:
        return self._body.streaming

    def prepare(self) -> list[Request]:
        body, service = self._body, self._service
        token_ids = encode_messages(
            service.tokenizer,
            body.messages,
            tools=self._tool_use.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        service.check_length(len(token_ids), body.most_tokens, "messages")
        max_tokens = body.most_tokens or service.client.limits.max_model_len - len(token_ids)
        logprobs = self._num_top_logprobs if body.logprobs else None
        requests = []
        for index in range(self.num_answers):
            sampling = body.sampling(
                max_tokens=max_tokens, index=index, logprobs=logprobs, grammar=self._tool_use.grammar
            )
            request_id = self._id if self.num_answers == 1 else f"{self._id}-{index}"
            requests.append(service.client.prepare(token_ids, sampling, request_id=request_id, tenant=self._salt))
        return requests

    def _pieces(self, index: int, text: str, is_last: bool) -> list[Event]:
        """What this text of an answer says: content, or calls of functions where there are any to call."""
        stream = self._tool_streams[index]
        if stream is None:
            return [Content(text)]
        return stream.push(text) + (stream.finish() if is_last else [])

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        stream = self._tool_streams[index]
        return "tool_calls" if reason == FinishReason.STOP and stream is not None and stream.num_calls else reason

    # ---- whole ----

    def num_completion_tokens(self, output: RequestOutput) -> int:
        return len(output.token_ids)

    def whole(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        tokenizer, choices = self._service.tokenizer, []
        for index, output in enumerate(outputs):
            logprobs = chat_logprobs(tokenizer, output.logprobs or [], self._num_top_logprobs)
            message = whole_message(self._pieces(index, output.text, is_last=True))
            choices.append(
                {
                    "index": index,
                    "message": {**message, "refusal": None},
                    "logprobs": logprobs if self._body.logprobs else None,
                    "finish_reason": self._finish_reason(index, output.finish_reason),
                }
            )
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": usage}
        if self._body.prompt_logprobs is not None:
            rows = outputs[0].prompt_logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs(tokenizer, rows, self._body.prompt_logprobs)
        return answer

    # ---- as events ----

    def opening(self, index: int) -> bytes:
        role = b'"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        usage = b',"usage":null' if self._body.stream_options and self._body.stream_options.include_usage else b""
        return self._event_starts[index] + role + b"}]" + usage + b"}\n\n"

    def event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        said = self._said(index, delta)
        logprobs = b"null"
        if self._body.logprobs and delta.token_ids:
            rows = (delta.output.logprobs or [])[-len(delta.token_ids) :]
            logprobs = encode_json(chat_logprobs(self._service.tokenizer, rows, self._num_top_logprobs))
        elif not said and usage in (b"", b"null") and delta.finish_reason is None:
            return b""
        return b"".join(
            (
                self._event_starts[index],
                said,
                b'},"logprobs":',
                logprobs,
                b',"finish_reason":',
                encode_json(self._finish_reason(index, delta.finish_reason)),
                b'}],"usage":' + usage + b"}\n\n" if usage else b"}]}\n\n",
            )
        )

    def _said(self, index: int, delta: Delta) -> bytes:
        """The inside of an event's delta."""
        if self._tool_streams[index] is None:  # nearly all tokens go this way
            return b'"content":' + encode_json(delta.text) if delta.text else b""
        return encode_json(as_delta(self._pieces(index, delta.text, delta.finish_reason is not None)))[1:-1]

    def usage_event(self, usage: bytes) -> bytes:
        return event_of(encode_json(self._head)[:-1] + b',"choices":[],"usage":' + usage + b"}")
