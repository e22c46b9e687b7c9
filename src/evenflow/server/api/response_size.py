"""The most bytes that a response can take, known before anything is computed for it.

Counted are the JSON text with the model's longest token everywhere, and what the server holds until it is written. The
larger of the two counts: with short tokens that is the second.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from evenflow.core.plan import RowLogprobs
from evenflow.engine.outputs import RequestOutput
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.json_pieces import encode_json

# In memory, on 64 bits.
_TOKEN_BYTES = 80  # its id and its time, in lists
PROMPT_TOKEN_BYTES = 16  # its place in two lists, for each choice
_ROW_BYTES = 240  # the tuples of a row of logprobs, without its entries
_ENTRY_BYTES = 128
# Of JSON, around the text of a token.
_ID_BYTES = 11
_LOGPROB_BYTES = 25
_ENTRY_NAMES = 64
_BYTE_NUMBER = 4  # "255,"
CALL_BYTES = 40  # a tool call's fields, for each token of one


class TokenSizes:
    """The most JSON that a token can take, in each of the formats."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def text(self) -> int:
        """As part of a text. What is no whole character becomes a replacement character."""
        tokens = self._tokenizer.all_token_bytes()
        return max((len(encode_json(token.decode(errors="replace"))) - 2 for token in tokens), default=1)

    @property
    def plain(self) -> int:
        """In a text, without logprobs."""
        return max(self.text, _TOKEN_BYTES)

    @property
    def token_id(self) -> int:
        return _ID_BYTES

    def completion_row(self, num_top: int) -> int:
        """With the logprobs of a completion."""
        names = (num_top + 2) * (self.text + 4) + (num_top + 2) * _LOGPROB_BYTES + _ID_BYTES
        return max(names, held_row(num_top))

    def chat_row(self, num_top: int) -> int:
        entry = self.text + _BYTE_NUMBER * self._tokenizer.longest_token_bytes + _LOGPROB_BYTES + _ENTRY_NAMES
        return max((num_top + 1) * entry, held_row(num_top))

    def prompt_row(self, num_top: int) -> int:
        """With `prompt_logprobs`."""
        return max((num_top + 1) * (self.text + _LOGPROB_BYTES + _ENTRY_NAMES), held_row(num_top))


def held_row(num_top: int) -> int:
    return _ROW_BYTES + (num_top + 1) * _ENTRY_BYTES


def held_bytes(outputs: Iterable[RequestOutput]) -> int:
    """About what these take in memory."""
    return sum(
        len(output.prompt_token_ids) * PROMPT_TOKEN_BYTES
        + len(output.token_ids) * _TOKEN_BYTES
        + len(output.text)
        + _rows_bytes(output.logprobs)
        + _rows_bytes(output.prompt_logprobs)
        + (0 if output.embedding is None else output.embedding.itemsize * len(output.embedding))
        for output in outputs
    )


def _rows_bytes(rows: list[RowLogprobs] | None) -> int:
    return len(rows) * held_row(len(rows[0].top)) if rows else 0
