"""Renders conversations by the model's chat template, in a process that can be stopped."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from evenflow.errors import EngineFailed, InvalidRequest
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api import template_process
from evenflow.server.api.fair_slots import FairSlots
from evenflow.server.engine.helper_process import HelperProcess

_MAX_CPU_S = 2.0  # a thousand times what most conversations take
_MAX_WAITING = 4096  # conversations of one client

_decode = msgspec.msgpack.Decoder(template_process.Rendered).decode


class TemplateRenderer:
    """One conversation at a time: if the process is killed, it is clear which one it was."""

    def __init__(
        self, tokenizer: Tokenizer, *, allows_special_tokens: bool = False, max_cpu_s: float = _MAX_CPU_S
    ) -> None:
        self._template = tokenizer.chat_template
        self._protects = not allows_special_tokens
        self._max_cpu_s = max_cpu_s
        arguments = self._template, tokenizer.special_tokens, max_cpu_s
        self._helper = HelperProcess("evenflow-chat-template", template_process.run, *arguments)
        self._slots = FairSlots(1, 1, _MAX_WAITING, "their conversations to be rendered")

    async def start(self) -> None:
        """Ahead of the first conversation, which would wait for it."""
        if self._template is not None:
            await self._helper.start()

    async def close(self) -> None:
        await self._helper.close()

    def question(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        variables: dict[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> bytes:
        """For `render`. Takes long for large conversations: make it on a thread."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send plain text instead of messages")
        fields = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        try:
            return json.dumps({**fields, "variables": variables, "protect": self._protects}).encode()
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"Got messages that cannot be rendered: {error}.") from error

    async def render(self, question: bytes, client: str) -> str:
        """The text, for `Tokenizer.encode_rendered`."""
        async with self._slots.slot(client):
            try:
                rendered = _decode(await self._helper.ask(question))
            except EngineFailed:
                if self._helper.is_closed:
                    raise
                raise InvalidRequest(
                    f"the model's chat template takes more than {self._max_cpu_s:g} s or too much memory "
                    "for these messages"
                ) from None
        if rendered.problem:
            raise InvalidRequest(rendered.problem)
        return rendered.text
