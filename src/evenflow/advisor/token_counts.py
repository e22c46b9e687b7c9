"""How many tokens a text has: counted by a tokenizer, or estimated. Needs no tokenizer's package itself."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from evenflow.errors import InvalidInput
from evenflow.workload.inputs import ChatInput, TextInput

_CHARACTERS_PER_TOKEN = 4


class TokenCounter(Protocol):
    """Counts the tokens of a text; `description` tells the reader of the report how."""

    @property
    def description(self) -> str: ...

    def count(self, text: TextInput | ChatInput) -> int: ...


class EstimatedTokens:
    """One token per four characters: right within about 20% for English, far too low for many scripts."""

    description = "estimated: characters / 4 (give a tokenizer or a model for real counts)"

    def count(self, text: TextInput | ChatInput) -> int:
        return -(-len(text.text) // _CHARACTERS_PER_TOKEN)


class TokenizerTokens:
    """Counts with a tokenizer of evenflow, transformers or tokenizers, and conversations with its chat template."""

    def __init__(self, tokenizer: Any, name: str | None = None) -> None:
        if not hasattr(tokenizer, "encode") or isinstance(tokenizer, str):
            raise InvalidInput(
                f"Got tokenizer={tokenizer!r} but expected an object with encode(text), such as "
                "evenflow.model.formats.hf_tokenizer.read_hf_tokenizer(Path(FOLDER))."
            )
        self._tokenizer = tokenizer
        name = name or getattr(tokenizer, "name_or_path", None)
        self.description = f"counted by the tokenizer of {name}" if name else "counted by the tokenizer given"

    def count(self, text: TextInput | ChatInput) -> int:
        prompt, options = text.text, {}
        if isinstance(text, ChatInput) and getattr(self._tokenizer, "chat_template", None):
            with suppress(Exception):  # the template rejects these roles; the text still counts
                render = self._tokenizer.apply_chat_template
                prompt = render(text.messages, tokenize=False, add_generation_prompt=True)
                options = {"add_special_tokens": False}
        valid = prompt.encode("utf-8", "replace").decode()  # JSON can hold half a character, which tokenizers reject
        return len(self._tokenizer.encode(valid, **options))
