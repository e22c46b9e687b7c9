"""POST /v1/chat/completions: renders a conversation with the model's chat template and writes the assistant's turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenflow.core.request import FinishReason, Request
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.errors import InvalidRequest
from evenflow.model.chat_template import ToolStyle
from evenflow.model.tokenizer import Tokenizer
from evenflow.server.access import Caller
from evenflow.server.api.logprobs import chat_logprobs, prompt_logprobs
from evenflow.server.api.request_models import ChatBody, ChatMessage
from evenflow.server.api.response_writer import ResponseWriter, encode_json
from evenflow.server.api.service import ModelService
from evenflow.server.api.tool_stream import Content, Event, as_delta, whole_message


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[ChatMessage],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    variables: dict[str, Any] | None = None,
) -> list[int]:
    """The token ids of a conversation, by default including the start of the assistant's turn."""
    variables = variables or {}
    for name in ("self", "messages", "tools", "add_generation_prompt"):
        if name in variables:
            raise InvalidRequest(f"Got {name!r} in chat_template_kwargs but it has a field of its own.")
    text = tokenizer.apply_chat_template(
        [message.model_dump(exclude_none=True) for message in messages],
        tools=tools,
        add_generation_prompt=add_generation_prompt is not False,
        **variables,
    )
    return tokenizer.encode(text, add_special_tokens=False)


class ChatWriter(ResponseWriter[ChatBody]):
    """Writes the response to one chat."""

    def __init__(self, service: ModelService, body: ChatBody, caller: Caller) -> None:
        object_name = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, caller, id_prefix="chatcmpl", object_name=object_name, event_start=b'"delta":{')
        self._num_top_logprobs = body.top_logprobs or 0
        template = service.tokenizer.chat_template
        self._tool_use = body.tool_use(template.tool_style if template else ToolStyle.HERMES, body.grammar)
        self._tool_streams = [self._tool_use.new_stream() for _ in range(self.num_choices)]

    def prepare(self) -> list[Request]:
        body, service = self.body, self._service
        token_ids = encode_messages(
            service.tokenizer,
            body.messages,
            tools=self._tool_use.tools,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.chat_template_kwargs,
        )
        service.check_length(len(token_ids), body.max_output_tokens, "messages")
        return self._requests(
            token_ids,
            max_tokens=body.max_output_tokens or service.client.limits.max_model_len - len(token_ids),
            logprobs=self._num_top_logprobs if body.logprobs else None,
            grammar=self._tool_use.grammar,
        )

    def response(self, outputs: Sequence[RequestOutput], usage: dict[str, Any]) -> dict[str, Any]:
        tokenizer, body = self._service.tokenizer, self.body
        choices = [
            {
                "index": index,
                "message": {**whole_message(self._parse(index, output.text, is_last=True)), "refusal": None},
                "logprobs": self._logprobs(output, len(output.token_ids)) if body.logprobs else None,
                "finish_reason": self._finish_reason(index, output.finish_reason),
            }
            for index, output in enumerate(outputs)
        ]
        response: dict[str, Any] = {**self._head, "choices": choices, "usage": usage}
        if body.prompt_logprobs is not None:
            rows = outputs[0].prompt_logprobs or []
            response["prompt_logprobs"] = prompt_logprobs(tokenizer, rows, body.prompt_logprobs)
        return response

    def first_event(self, index: int) -> bytes:
        usage = b"null" if self.body.stream_options and self.body.stream_options.include_usage else b""
        return self._write_event(index, b'"role":"assistant","content":""}', b"null", None, usage)

    def event(self, index: int, delta: Delta, usage: bytes) -> bytes:
        content, logprobs = self._delta_content(index, delta), b"null"
        if self.body.logprobs and delta.token_ids:
            logprobs = encode_json(self._logprobs(delta.output, len(delta.token_ids)))
        elif not content and usage in (b"", b"null") and delta.finish_reason is None:
            return b""
        reason = None if delta.finish_reason is None else self._finish_reason(index, delta.finish_reason)
        return self._write_event(index, content + b"}", logprobs, reason, usage)

    def _delta_content(self, index: int, delta: Delta) -> bytes:
        """The members of the event's delta object."""
        if self._tool_streams[index] is None:  # true for nearly all tokens
            return b'"content":' + encode_json(delta.text) if delta.text else b""
        return encode_json(as_delta(self._parse(index, delta.text, delta.finish_reason is not None)))[1:-1]

    def _parse(self, index: int, text: str, is_last: bool) -> list[Event]:
        """Split text into content and tool calls."""
        stream = self._tool_streams[index]
        if stream is None:
            return [Content(text)]
        return stream.push(text) + (stream.finish() if is_last else [])

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        stream = self._tool_streams[index]
        return "tool_calls" if reason == FinishReason.STOP and stream is not None and stream.num_calls else reason

    def _logprobs(self, output: RequestOutput, num_last: int) -> dict[str, Any]:
        rows = (output.logprobs or [])[-num_last:]
        return chat_logprobs(self._service.tokenizer, rows, self._num_top_logprobs)
