"""POST /v1/chat/completions: renders a conversation with the model's chat template and writes the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import FinishReason, Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.model.text.chat_template import ToolStyle
from evenflow.server.access import Caller
from evenflow.server.api.json_pieces import Rows, encode_json
from evenflow.server.api.logprobs import chat_row
from evenflow.server.api.request_models import ChatBody, ChatMessage
from evenflow.server.api.response_size import CALL_BYTES
from evenflow.server.api.response_writer import ResponseWriter
from evenflow.server.api.service import ModelService
from evenflow.server.api.tool_stream import whole_message


def template_question(
    service: ModelService,
    messages: Sequence[ChatMessage],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    variables: dict[str, Any] | None = None,
    param: str = "messages",
) -> bytes:
    """What to ask the template renderer for a conversation, by default including the start of the assistant's turn."""
    variables = variables or {}
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "protected"):
        if name in variables:
            raise InvalidRequest(f"Got {name!r} in chat_template_kwargs but it has a field of its own.")
    service.check_text((text for message in messages for text in message.texts()), param)
    plain = [message.model_dump(exclude_none=True) for message in messages]
    adds_turn = add_generation_prompt is not False and not continue_final_message
    return service.templates.question(
        plain, tools, adds_turn, variables, continue_final_message=bool(continue_final_message)
    )


def encode_rendered(service: ModelService, text: str, param: str = "messages") -> list[int]:
    service.check_prompt(text, param)
    return service.tokenizer.encode_rendered(text)


class ChatWriter(ResponseWriter[ChatBody]):
    """Writes the response to one chat."""

    _ID_PREFIX = "chatcmpl-"
    _PROMPT_PARAM: ClassVar[str] = "messages"
    _DELTA_NAME = b"delta"
    _NO_CONTENT = b"{}"

    def __init__(self, service: ModelService, body: ChatBody, caller: Caller) -> None:
        super().__init__(service, body, caller, "chat.completion.chunk" if body.stream else "chat.completion")
        template = service.tokenizer.chat_template
        self._tool_use = body.tool_use(template.tool_style if template else ToolStyle.HERMES, body.grammar)
        self.grammar = self._tool_use.grammar
        self._tool_streams = [self._tool_use.new_stream() for _ in range(self.num_choices)]
        self._prompt: list[int] = []

    def template_question(self) -> bytes:
        return template_question(
            self._service,
            self.body.messages,
            tools=self._tool_use.tools,
            add_generation_prompt=self.body.add_generation_prompt,
            continue_final_message=self.body.continue_final_message,
            variables=self.body.template_variables,
            param=self._PROMPT_PARAM,
        )

    def prepare(self, rendered: str) -> list[Request]:
        token_ids = encode_rendered(self._service, rendered, self._PROMPT_PARAM)
        self._prompt = self._truncated(token_ids, self.body.max_output_tokens)
        return self._requests(self._prompt, self._max_tokens(len(self._prompt)))

    def _max_tokens(self, num_prompt_tokens: int) -> int:
        """Of the output, after a check that there is room for them."""
        asked = self.body.max_output_tokens
        self._service.check_length(num_prompt_tokens, asked, self._PROMPT_PARAM)
        if asked is None:
            return self._tokens_that_fit(num_prompt_tokens)
        self._check_size([num_prompt_tokens], asked)
        return asked

    def _prompt_bytes(self, num_tokens: int) -> int:
        """Said once. Each choice of a stream has the ids."""
        times = self.body.num_choices if self.body.stream else 1
        return num_tokens * (self._prompt_row_bytes() + times * self._sizes.token_id * bool(self.body.return_token_ids))

    def _token_bytes(self) -> int:
        row = 0 if self._num_logprobs is None else self._sizes.chat_row(self._num_logprobs)
        calls = CALL_BYTES if self._tool_use.tools else 0
        return self._sizes.plain + row + calls + self._sizes.token_id * bool(self.body.return_token_ids)

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        response = super().response(outputs, usage)
        if self.body.prompt_logprobs is not None:
            response["prompt_logprobs"] = self._prompt_logprobs(outputs[0], self.body.prompt_logprobs)
        if self.body.return_token_ids:
            response["prompt_token_ids"] = outputs[0].prompt_token_ids
        return response

    def first_event(self, index: int, usage: bytes) -> bytes:
        event = self._write_event(index, b'{"role":"assistant","content":""}', usage)
        if self.body.return_token_ids:
            event = event.removesuffix(b"}\n\n") + b',"prompt_token_ids":' + encode_json(self._prompt) + b"}\n\n"
        return event

    def _content(self, index: int, output: RequestOutput) -> dict[str, Any]:
        stream = self._tool_streams[index]
        delta = {"content": output.text} if stream is None else stream.push(output.text, is_last=True)
        return {"message": {**whole_message(delta), "refusal": None}}

    def _deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """What the only choice adds with this text, in the order in which the model wrote it."""
        [stream] = self._tool_streams
        return [{"content": text}] if stream is None else stream.push_in_order(text, is_last)

    def _delta_content(self, index: int, delta: Delta) -> bytes:
        stream = self._tool_streams[index]
        if stream is None:  # true for nearly all tokens
            return b'{"content":' + encode_json(delta.text) + b"}" if delta.text else b"{}"
        return encode_json(stream.push(delta.text, is_last=delta.finish_reason is not None))

    def _logprobs(
        self, index: int, output: RequestOutput, token_ids: Sequence[int], rows: LogprobRows
    ) -> dict[str, Any]:
        make = partial(chat_row, self._service.tokenizer, self.body.top_logprobs or 0)
        return {"content": Rows(rows, make), "refusal": None}

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        stream = self._tool_streams[index]
        return "tool_calls" if reason == FinishReason.STOP and stream is not None and stream.num_calls else reason
