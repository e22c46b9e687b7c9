"""The most bytes that a response can take, known before anything is computed for it.

Counted is the JSON text with the model's longest token everywhere: more than what the server holds until it is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import ALL_LOGPROBS
from evenflow.engine.outputs import Delta, RequestOutput
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.json_pieces import encode_json

# In memory, on 64 bits.
_TOKEN_BYTES = 80  # its id and its time, in lists
PROMPT_TOKEN_BYTES = 16  # its place in two lists, for each choice
_JSON_PER_BYTE = 6  # of packed logprobs
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

    def completion_row(self, num_top: int | None) -> int:
        """With the logprobs of a completion, if any."""
        if num_top is None:
            return 0
        return (num_top + 2) * (self.text + 4) + (num_top + 2) * _LOGPROB_BYTES + _ID_BYTES

    def chat_row(self, num_top: int | None) -> int:
        if num_top is None:
            return 0
        entry = self.text + _BYTE_NUMBER * self._tokenizer.longest_token_bytes + _LOGPROB_BYTES + _ENTRY_NAMES
        return (num_top + 1) * entry

    def prompt_row(self, num_top: int | None, vocab_size: int) -> int:
        """With `prompt_logprobs`, if any."""
        if num_top is None:
            return 0
        num_top = vocab_size if num_top == ALL_LOGPROBS else num_top
        return (num_top + 1) * (self.text + _LOGPROB_BYTES + _ENTRY_NAMES)


def written_bytes(*logprobs: LogprobRows | None) -> int:
    """About what these take as JSON."""
    return _JSON_PER_BYTE * sum(rows.num_bytes for rows in logprobs if rows is not None)


def held_bytes(outputs: Iterable[RequestOutput]) -> int:
    """About what these take in memory."""
    return sum(
        len(output.prompt_token_ids) * PROMPT_TOKEN_BYTES
        + len(output.token_ids) * _TOKEN_BYTES
        + len(output.text)
        + sum(rows.num_bytes for rows in (output.logprobs, output.prompt_logprobs) if rows is not None)
        + (0 if output.embedding is None else output.embedding.itemsize * len(output.embedding))
        for output in outputs
    )


def event_bytes(delta: Delta, rows: LogprobRows) -> int:
    """About what an event with these logprobs takes: the first may have the prompt's too, the last repeat all."""
    num_tokens = len(delta.output.token_ids)
    num_times = 1 if delta.finish_reason is None else num_tokens // max(1, len(rows))
    return num_times * written_bytes(rows, delta.output.prompt_logprobs if len(rows) == num_tokens else None)
