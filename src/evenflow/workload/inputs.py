"""One request's input: its text, its conversation, or only its lengths.

Must not know: files, tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TextInput:
    """A prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation that a chat template makes a prompt of."""

    messages: Sequence[Mapping[str, Any]]

    @property
    def text(self) -> str:
        """What is said in it, without the marks of any template."""
        return "\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request whose tokens were counted when it was served.

    `block_ids` name its prompt's leading blocks: equal ids at the start of two prompts are an equal prefix.
    """

    num_prompt_tokens: int
    num_output_tokens: int | None = None
    arrival_s: float | None = None
    block_ids: tuple[int, ...] = ()


Input = TextInput | ChatInput | TraceRequest
