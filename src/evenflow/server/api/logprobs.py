"""Logprobs in the three shapes that clients know: OpenAI's for completions, OpenAI's for chats, vLLM's for prompts.

Must not know: requests, streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evenflow.core.plan import RowLogprobs, TokenLogprob
from evenflow.model.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token on its own; where it is a part of a character, with replacement characters."""
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    rows: Sequence[RowLogprobs | None],
    num_top: int,
    text_offset: int,
) -> dict[str, Any]:
    """Columns over the tokens. None stands for the first token of a prompt, which nothing predicts."""
    tokens = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if row is None else row.chosen.logprob for row in rows],
        "top_logprobs": [None if row is None else _by_text(tokenizer, row, num_top) for row in rows],
        "text_offset": offsets,
    }


def _by_text(tokenizer: Tokenizer, row: RowLogprobs, num_top: int) -> dict[str, float]:
    """The likeliest tokens and the one that came, by their text; of two with the same text, the likelier."""
    found: dict[str, float] = {}
    for token_id, logprob in (*row.top[:num_top], row.chosen):
        found.setdefault(token_text(tokenizer, token_id), logprob)
    return found


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], num_top: int) -> dict[str, Any]:
    return {
        "content": [
            _chat_entry(tokenizer, row.chosen)
            | {"top_logprobs": [_chat_entry(tokenizer, entry) for entry in row.top[:num_top]]}
            for row in rows
        ],
        "refusal": None,
    }


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(entry.token_id)
    return {"token": token_bytes.decode(errors="replace"), "logprob": entry.logprob, "bytes": list(token_bytes)}


def prompt_logprobs(tokenizer: Tokenizer, rows: Sequence[RowLogprobs], num_top: int) -> list[dict[str, Any] | None]:
    """By token id, for each token of the prompt; the first has none. A rank is known of the likeliest only."""
    found: list[dict[str, Any] | None] = [None]
    for row in rows:
        ranked = {entry.token_id: (entry.logprob, rank) for rank, entry in enumerate(row.top[:num_top], start=1)}
        ranked.setdefault(row.chosen.token_id, (row.chosen.logprob, 0))
        found.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": rank or None,
                    "decoded_token": token_text(tokenizer, token_id),
                }
                for token_id, (logprob, rank) in ranked.items()
            }
        )
    return found
