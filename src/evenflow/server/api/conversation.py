"""A conversation as the engine sees it: the chat template's prompt, and what its choices say and call.

Chats, messages and responses are formats of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenflow.core.request import FinishReason
from evenflow.model.text.chat_template import ToolStyle
from evenflow.server.access import Caller
from evenflow.server.api.job import Job, ResponseSize
from evenflow.server.api.request_models import ChatBody, ChatMessage
from evenflow.server.api.response_size import CALL_BYTES
from evenflow.server.api.service import ModelService
from evenflow.server.api.tools import TemplateFields
from evenflow.server.engine.served_engine import Prepared


def template_question(
    service: ModelService,
    body: TemplateFields,
    messages: Sequence[ChatMessage],
    tools: list[dict[str, Any]] | None,
    param: str = "messages",
) -> bytes:
    """What to ask the template renderer for a conversation, by default including the start of the assistant's turn."""
    service.check_text((text for message in messages for text in message.texts()), param)
    plain = [message.model_dump(exclude_none=True) for message in messages]
    continues = bool(body.continue_final_message)
    adds_turn = body.add_generation_prompt is not False and not continues
    return service.templates.question(
        plain, tools, adds_turn, body.template_variables, continue_final_message=continues
    )


def encode_rendered(service: ModelService, text: str, param: str = "messages") -> list[int]:
    service.check_prompt(text, param)
    return service.tokenizer.encode_rendered(text)


class Conversation:
    """One chat and its choices.

    `times_streamed`: how often the end of a stream repeats what was sent; `repeated`: bytes of the request's settings
    in the response. With `ends_with_context`, max_tokens may exceed the context.
    """

    def __init__(
        self,
        service: ModelService,
        body: ChatBody,
        caller: Caller,
        *,
        id_prefix: str,
        param: str = "messages",
        times_streamed: int = 0,
        ends_with_context: bool = False,
    ) -> None:
        self.body = body
        self.job = Job.of_choices(service, body, caller, id_prefix=id_prefix)
        template = service.tokenizer.chat_template
        self._tool_use = body.tool_use(template.tool_style if template else ToolStyle.HERMES, body.grammar)
        self.job.grammar = self._tool_use.grammar
        self.streams = [self._tool_use.new_stream() for _ in range(self.job.num_choices)]
        self.prompt: list[int] = []
        self.repeated_bytes = 0  # of the request's settings, if the response has them
        self._param = param
        self._times_streamed = times_streamed
        self._ends_with_context = ends_with_context

    def template_question(self) -> bytes:
        return template_question(self.job.service, self.body, self.body.messages, self._tool_use.tools, self._param)

    def prepare(self, rendered: str) -> list[Prepared]:
        token_ids = encode_rendered(self.job.service, rendered, self._param)
        self.prompt = self.job.truncated(token_ids, self.body.max_output_tokens)
        return self.job.requests(self.body, self.prompt, self._max_tokens(len(self.prompt)))

    def _max_tokens(self, num_prompt_tokens: int) -> int:
        """Of the output, after a check that there is room for them."""
        asked, size = self.body.max_output_tokens, self._size()
        self.job.service.check_length(num_prompt_tokens, None if self._ends_with_context else asked, self._param)
        if asked is not None and not self._ends_with_context:
            size.check(num_prompt_tokens, asked)
            return asked
        fitting = size.tokens_that_fit(num_prompt_tokens)
        return fitting if asked is None else min(asked, fitting)

    def _size(self) -> ResponseSize:
        """A prompt's ids and logprobs are said once; each choice of a stream has the ids."""
        job, body, sizes = self.job, self.body, self.job.service.token_sizes
        token_id = sizes.token_id * bool(body.return_token_ids)
        per_token = sizes.plain + sizes.chat_row(body.num_logprobs) + token_id
        per_token += CALL_BYTES if self._tool_use.tools else 0
        prompt_row = sizes.prompt_row(body.prompt_logprobs, job.service.limits.vocab_size)
        return ResponseSize(
            job,
            per_prompt_token=prompt_row + token_id * (job.num_choices if body.stream else 1),
            per_step=per_token * job.num_choices * (self._times_streamed if body.stream else 1),
            repeated=self.repeated_bytes,
        )

    def deltas(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        """Deltas of the single choice, in the order in which the model wrote them."""
        [stream] = self.streams
        return [{"content": text}] if stream is None else stream.push_in_order(text, is_last)

    def finish_reason(self, index: int, reason: str | None) -> str | None:
        stream = self.streams[index]
        return "tool_calls" if reason == FinishReason.STOP and stream is not None and stream.num_calls else reason
