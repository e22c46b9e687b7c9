"""Logprobs in three formats: OpenAI's for completions, OpenAI's for chats, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenflow.core.plan import RowLogprobs, TokenLogprob
from evenflow.core.request import ALL_LOGPROBS
from evenflow.engine.outputs import TextDecoder
from evenflow.model.tokenizer import Tokenizer


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
    rows: Sequence[RowLogprobs | None],
    num_top: int,
    text_offsets: Sequence[int],
) -> dict[str, Any]:
    """One list per figure. A row is None for the first token of a prompt, which nothing predicts."""
    return {
        "tokens": [token_text(tokenizer, token_id) for token_id in token_ids],
        "token_logprobs": [None if row is None else row.chosen.logprob for row in rows],
        "top_logprobs": [None if row is None else _by_text(tokenizer, row, num_top) for row in rows],
        "text_offset": text_offsets,
    }


def _by_text(tokenizer: Tokenizer, row: RowLogprobs, num_top: int) -> dict[str, float]:
    """The top tokens and the chosen one by text; of several with the same text, the likeliest."""
    found: dict[str, float] = {}
    for token_id, logprob in (*row.top[:num_top], row.chosen):
        found.setdefault(token_text(tokenizer, token_id), logprob)
    return found


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], num_top: int) -> dict[str, Any]:
    def entry(token: TokenLogprob) -> dict[str, Any]:
        token_bytes = tokenizer.token_bytes(token.token_id)
        return {"token": token_bytes.decode(errors="replace"), "logprob": token.logprob, "bytes": list(token_bytes)}

    content = [entry(row.chosen) | {"top_logprobs": [entry(token) for token in row.top[:num_top]]} for row in rows]
    return {"content": content, "refusal": None}


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """By token id, for each token of the prompt but the first. Only the top tokens have a rank."""
    found: list[dict[str, Any] | None] = [None]
    most = None if num_top == ALL_LOGPROBS else num_top
    for row in rows:
        ranks: list[tuple[TokenLogprob, int | None]] = [(top, rank) for rank, top in enumerate(row.top[:most], 1)]
        entries: dict[str, Any] = {}
        for (token_id, logprob), rank in (*ranks, (row.chosen, None)):
            entry = {"logprob": logprob, "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
            entries.setdefault(str(token_id), entry)
        found.append(entries)
    return found
