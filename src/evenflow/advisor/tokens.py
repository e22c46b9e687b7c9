"""How many tokens an input has: as the file says, by a tokenizer that is given, or estimated from its characters.

Must not know: tokenizer files.
"""

from __future__ import annotations

from typing import Protocol

from evenflow.workload.inputs import ChatInput, TextInput

_CHARACTERS_PER_TOKEN = 4


class TokenCounter(Protocol):
    """Counts the tokens of texts; `description` says how, for whoever reads the figures."""

    description: str

    def count(self, text: TextInput | ChatInput) -> int: ...


class EstimatedTokens:
    """A token for every four characters: right for English within about a fifth, far too low for many scripts."""

    description = "estimated: characters / 4 (give a tokenizer or a model for real counts)"

    def count(self, text: TextInput | ChatInput) -> int:
        return -(-len(text.text) // _CHARACTERS_PER_TOKEN)
