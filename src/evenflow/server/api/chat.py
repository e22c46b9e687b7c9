"""POST /v1/chat/completions: renders a conversation with the model's chat template and writes the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from evenflow.core.logprobs import LogprobRows
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.server.access import Caller
from evenflow.server.api.choices import Choices
from evenflow.server.api.conversation import Conversation
from evenflow.server.api.formats import failed_stream
from evenflow.server.api.json_pieces import Rows, encode_json
from evenflow.server.api.logprobs import chat_row, prompt_logprobs
from evenflow.server.api.request_models import ChatBody
from evenflow.server.api.service import ModelService
from evenflow.server.api.tool_stream import whole_message


class ChatFormat:
    """One chat."""

    failure_events = staticmethod(failed_stream)

    def __init__(self, service: ModelService, body: ChatBody, caller: Caller) -> None:
        self._body = body
        self._tokenizer = service.tokenizer
        self._conversation = conversation = Conversation(service, body, caller, id_prefix="chatcmpl-")
        self.job = conversation.job
        self.template_question, self.prepare = conversation.template_question, conversation.prepare
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._choices = Choices(self.job, kind, b"delta", b"{}", text_name=b"content")
        self.last_events = self._choices.last_events
        self._begun: set[int] = set()  # choices whose first event is written
        self._is_plain = not (body.return_token_ids or body.logprobs) and conversation.streams[0] is None

    # ---- whole ----

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        body, first = self._body, outputs[0]
        choices = (self._whole_choice(index, output) for index, output in enumerate(outputs))
        response = self._choices.whole(choices, usage)
        if (num_top := body.prompt_logprobs) is not None:
            rows = first.prompt_logprobs or ()
            response["prompt_logprobs"] = prompt_logprobs(self._tokenizer, rows, num_top, is_shared=False)
        if body.return_token_ids:
            response["prompt_token_ids"] = first.prompt_token_ids
        return response

    def _whole_choice(self, index: int, output: RequestOutput) -> dict[str, Any]:
        stream = self._conversation.streams[index]
        delta = {"content": output.text} if stream is None else stream.push(output.text, is_last=True)
        choice = {
            "message": {**whole_message(delta), "refusal": None},
            "logprobs": self._logprobs(output.logprobs or LogprobRows()) if self._body.logprobs else None,
            "finish_reason": self._conversation.finish_reason(index, output.finish_reason),
        }
        return {**choice, "token_ids": output.token_ids} if self._body.return_token_ids else choice

    # ---- streamed ----

    def event(self, index: int, delta: Delta, rows: LogprobRows, usage: bytes) -> bytes:
        if index not in self._begun:
            self._begun.add(index)
            return self._first_event(index, usage) + self.event(index, delta, rows, usage)
        if self._is_plain and delta.text and delta.finish_reason is None:
            return self._choices.text_event(index, delta.text, usage)
        return self._choices.events(
            index,
            self._content(index, delta.text, delta.finish_reason is not None),
            usage,
            reason=self._conversation.finish_reason(index, delta.finish_reason),
            logprobs=self._logprobs(rows) if self._body.logprobs and delta.token_ids else None,
            token_ids=delta.token_ids if self._body.return_token_ids else None,
        )

    def _first_event(self, index: int, usage: bytes) -> bytes:
        event = self._choices.event(index, b'{"role":"assistant","content":""}', usage)
        if self._body.return_token_ids:
            prompt = encode_json(self._conversation.prompt)
            event = event.removesuffix(b"}\n\n") + b',"prompt_token_ids":' + prompt + b"}\n\n"
        return event

    def _content(self, index: int, text: str, is_last: bool) -> bytes:
        if (stream := self._conversation.streams[index]) is not None:
            return encode_json(stream.push(text, is_last))
        return b'{"content":' + encode_json(text) + b"}" if text else b"{}"

    # ---- both ----

    def _logprobs(self, rows: LogprobRows) -> dict[str, Any]:
        return {
            "content": Rows(rows, partial(chat_row, self._tokenizer, self._body.top_logprobs or 0)),
            "refusal": None,
        }
