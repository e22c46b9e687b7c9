"""A request's own rules on tokens: `logit_bias`, `allowed_token_ids` and `bad_words`, as arrays over the vocabulary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenflow.core.request import SamplingParams


class TokenRules:
    """Made once for a request that has such rules; applied in each of its steps."""

    def __init__(self, params: SamplingParams, num_logits: int) -> None:
        self.restricts = params.allowed_token_ids is not None or bool(params.bad_word_ids)
        self._allowed = np.full(num_logits, params.allowed_token_ids is None)
        if params.allowed_token_ids is not None:
            self._allowed[list(params.allowed_token_ids)] = True
        # By the token before the last: a step looks only at those that may be about to end.
        self._about_to_end: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for token_ids in params.bad_word_ids:
            if len(token_ids) == 1:
                self._allowed[token_ids[0]] = False
            else:
                self._about_to_end[token_ids[-2]].append(token_ids)
        biases = params.logit_bias or {}
        self._biased_ids = np.array(list(biases), dtype=np.int64)
        self._biases = np.array(list(biases.values()), dtype=np.float32)

    @classmethod
    def of(cls, params: SamplingParams, num_logits: int) -> TokenRules | None:
        """None if the request has none."""
        has_rules = params.logit_bias or params.allowed_token_ids is not None or params.bad_word_ids
        return cls(params, num_logits) if has_rules else None

    def allowed(self, tokens: Sequence[int], num_prompt_tokens: int) -> NDArray[np.bool_]:
        """By token id, whether it may follow `tokens`. Only the output counts as the start of a bad word."""
        num_output = len(tokens) - num_prompt_tokens
        ends = [
            token_ids[-1]
            for token_ids in self._about_to_end.get(tokens[-1], ())
            if len(token_ids) - 1 <= num_output and tuple(tokens[1 - len(token_ids) :]) == token_ids[:-1]
        ]
        if not ends:
            return self._allowed
        allowed = self._allowed.copy()
        allowed[ends] = False
        return allowed

    def add_biases(self, row: NDArray[np.float32]) -> None:
        row[self._biased_ids] += self._biases
