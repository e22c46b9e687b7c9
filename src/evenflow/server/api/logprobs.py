"""Logprobs in three formats: OpenAI's for completions, OpenAI's for chats, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from evenflow.core.logprobs import LogprobRows, RowLogprobs, TokenLogprob
from evenflow.core.request import ALL_LOGPROBS
from evenflow.engine.outputs import TextDecoder
from evenflow.model.text.tokenizer import Tokenizer
from evenflow.server.api.json_pieces import Rows


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a single token; incomplete characters become replacement characters."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


class TextOffsets:
    """Where each token of a text begins, in characters, as the tokens come."""

    def __init__(self, decoder: TextDecoder, start: int = 0) -> None:
        self._decoder = decoder
        self._num_characters = start

    def take(self, token_ids: Sequence[int]) -> list[int]:
        """Those of the next tokens. A token inside a character begins where the character does."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.push(token_id))
        return offsets


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: LogprobRows,
    num_top: int,
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """One list per figure. The first token of a prompt has no row: nothing predicts it."""
    chosen: list[float | None] = [*rows.chosen]
    top: Sequence[int | None] = range(len(rows))
    if len(rows) < len(token_ids):
        chosen, top = [None, *chosen], [None, *top]

    def alternatives(row: int | None) -> dict[str, float] | None:
        return None if row is None else _by_text(tokenizer, rows[row], num_top)

    return {
        "tokens": Rows(token_ids, partial(token_text, tokenizer)),
        "token_logprobs": chosen,
        "top_logprobs": Rows(top, alternatives),
        "text_offset": text_offsets,
    }


def _by_text(tokenizer: Tokenizer, row: RowLogprobs, num_top: int) -> dict[str, float]:
    """The top tokens and the chosen one by text; of several with the same text, the likeliest."""
    found: dict[str, float] = {}
    for token_id, logprob in (*row.top[:num_top], row.chosen):
        found.setdefault(token_text(tokenizer, token_id), logprob)
    return found


def chat_row(tokenizer: Tokenizer, num_top: int, row: RowLogprobs) -> dict[str, Any]:
    """The logprobs of one token of a chat."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        token_bytes = tokenizer.token_bytes(token.token_id)
        return {"token": token_bytes.decode(errors="replace"), "logprob": token.logprob, "bytes": list(token_bytes)}

    return entry(row.chosen) | {"top_logprobs": [entry(token) for token in row.top[:num_top]]}


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], num_top: int, *, is_shared: bool) -> Rows[int]:
    """By token id, for each token of the prompt but the first."""

    def of_token(place: int) -> dict[str, Any] | None:
        return _by_id(tokenizer, num_top, rows[place - 1]) if place else None

    return Rows(range(len(rows) + 1), of_token, is_shared=is_shared)


def _by_id(tokenizer: Tokenizer, num_top: int, row: RowLogprobs) -> dict[str, Any]:
    """The top tokens and the prompt's own. Only the top tokens have a rank."""
    most = None if num_top == ALL_LOGPROBS else num_top
    ranks: list[tuple[TokenLogprob, int | None]] = [(top, rank) for rank, top in enumerate(row.top[:most], 1)]
    entries: dict[str, Any] = {}
    for (token_id, logprob), rank in (*ranks, (row.chosen, None)):
        entry = {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        entries.setdefault(str(token_id), entry)
    return entries
