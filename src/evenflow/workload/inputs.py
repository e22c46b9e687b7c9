"""One request's input: its text, its conversation, or only its lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextInput:
    text: str


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation, to be rendered by a chat template."""

    messages: Sequence[Mapping[str, Any]]

    @property
    def text(self) -> str:
        """The contents, without the markers of a template."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace, with its token counts. Prompts with equal leading `block_ids` share a prefix."""

    num_prompt_tokens: int
    num_output_tokens: int | None = None
    arrival_s: float | None = None
    block_ids: tuple[int, ...] = ()


Input = TextInput | ChatInput | TraceRequest
