"""Prompts for the text between a prefix and a suffix, for models that were trained to fill it in."""

from __future__ import annotations

from typing import NamedTuple

from evenflow.model.tokenizer import Tokenizer

_KNOWN = (  # before the prefix, before the suffix, before the text to fill in
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)


class InfillTokens(NamedTuple):
    """The special tokens of one vocabulary between the parts of such a prompt."""

    prefix: int
    suffix: int
    middle: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens | None:
        """None if the model has none: it was not trained to fill in text."""
        for names in _KNOWN:
            prefix, suffix, middle = map(tokenizer.token_id, names)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle)
        return None

    def prompt(self, before: list[int], after: list[int]) -> list[int]:
        return [self.prefix, *before, self.suffix, *after, self.middle]
