"""Logits to tokens, for all sampled rows of a step at once.

A row's random number depends only on its seed and position, so neither the batch nor the chunks can change the token.
Logprobs are those of the model itself, before grammars, biases, penalties, temperature and truncation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import ALL_LOGPROBS, SamplingParams
from evenflow.errors import InvalidRequest
from evenflow.model.token_rules import TokenRules

if TYPE_CHECKING:
    from evenflow.model.text.grammar import Constraint

_64_BITS = (1 << 64) - 1
MIN_TEMPERATURE = 1e-30  # a smaller one may be 0 as a float32
MAX_LOGIT = float(np.finfo(np.float32).max)  # penalties make none infinite: a row's weights would be NaN


@dataclass(slots=True)
class SampledSequence:
    """The part of one sequence's state that sampling needs."""

    params: SamplingParams
    seed: int
    tokens: list[int]  # prompt and output so far
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    constraint: Constraint | None = None
    rules: TokenRules | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def may_not_stop(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and bool(self.stop_token_ids)


@dataclass(slots=True)
class Samples:
    """A token per row; errors, faults and logprobs by row number. The token of a failed row is meaningless."""

    tokens: list[int]
    errors: dict[int, str] = field(default_factory=dict)  # the request's rules leave no token
    faults: dict[int, str] = field(default_factory=dict)  # the logits are not numbers
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)


def sample(logits: Tensor, sequences: Sequence[SampledSequence]) -> Samples:
    """One token for each row of `logits`, which it overwrites."""
    faults = logit_faults(logits.amax(-1).tolist())
    errors: dict[int, str] = {}
    raw = {
        row: logits[row].log_softmax(-1)
        for row, sequence in enumerate(sequences)
        if sequence.params.logprobs is not None and row not in faults
    }
    # Shares memory: over one vocabulary, numpy's argmax and partitions are several times as fast as torch's.
    rows: NDArray[np.float32] = logits.numpy()
    for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if (sequence.constraint is not None or sequence.rules is not None) and number not in faults:
            try:
                _constrain(row, sequence)
            except InvalidRequest as error:
                errors[number] = str(error)
        elif sequence.may_not_stop:
            row[list(sequence.stop_token_ids)] = -math.inf
        _penalise(row, sequence)
    tokens: list[int] = rows.argmax(-1).tolist()
    for number, sequence in enumerate(sequences):
        if sequence.params.temperature > 0 and number not in errors and number not in faults:
            tokens[number] = _draw(rows[number], sequence)
    logprobs = {
        row: logprob_rows(logprob.unsqueeze(0), tokens[row : row + 1], sequences[row].params.logprobs)
        for row, logprob in raw.items()
    }
    return Samples(tokens, errors, faults, logprobs)


def logprob_rows(logprobs: Tensor, tokens: Sequence[int], num_top: int | None) -> LogprobRows:
    """Each token's logprob and the `num_top` likeliest, from rows of log-probabilities."""
    vocab_size = logprobs.shape[-1]
    num_top = vocab_size if num_top == ALL_LOGPROBS else min(num_top or 0, vocab_size)
    values, ids = logprobs.topk(num_top)
    chosen = torch.tensor(tokens).unsqueeze(1)
    return pack_rows(torch.cat([chosen, ids], 1), torch.cat([logprobs.gather(1, chosen), values], 1))


def pack_rows(ids: Tensor, values: Tensor) -> LogprobRows:
    """From columns on the host, the chosen token's first."""
    packed = ids.numpy().astype(np.int32).tobytes(), values.numpy().astype(np.float32).tobytes()
    return LogprobRows(ids.shape[1] - 1, *map(bytearray, packed))


def logit_faults(largest: Sequence[float]) -> dict[int, str]:
    """Rows whose largest logit is not finite: a single NaN in a row makes it NaN."""
    return {
        row: f"The model gave no usable logits: their largest value is {value}."
        for row, value in enumerate(largest)
        if not math.isfinite(value)
    }


def _constrain(row: NDArray[np.float32], sequence: SampledSequence) -> None:
    """Mask all but what the grammar and the request's rules allow, then add its biases."""
    if (allowed := allowed_next(sequence)) is not None:
        np.copyto(row, -np.inf, where=~allowed)
    elif sequence.may_not_stop:
        row[list(sequence.stop_token_ids)] = -math.inf
    if sequence.rules is not None:
        row[sequence.rules.biased_ids] += sequence.rules.biases


def allowed_next(sequence: SampledSequence) -> NDArray[np.bool_] | None:
    """By token id, whether it may come next; None if neither the grammar nor the rules say.

    `min_tokens` is waived if they allow nothing but an end.
    """
    allowed = _allowed(sequence)
    if allowed is None or not sequence.may_not_stop:
        return allowed
    continuing = allowed.copy()
    continuing[list(sequence.stop_token_ids)] = False
    return continuing if continuing.any() else allowed


def _allowed(sequence: SampledSequence) -> NDArray[np.bool_] | None:
    so_far = sequence.tokens, sequence.num_prompt_tokens
    constraint, rules = sequence.constraint, sequence.rules
    allowed = None if constraint is None else constraint.allowed(*so_far)
    if rules is None or not rules.restricts:
        return allowed
    by_rules = rules.allowed(*so_far)
    allowed = by_rules if allowed is None else allowed & by_rules
    if not allowed.any():
        names = "allowed_token_ids and bad_words" + ("" if constraint is None else " beside the grammar")
        raise InvalidRequest(f"{names} leave no token to go on with after {sequence.num_output_tokens} tokens")
    return allowed


def _penalise(row: NDArray[np.float32], sequence: SampledSequence) -> None:
    """Repetition counts all tokens, as in Hugging Face; presence and frequency count output only, as at OpenAI."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(sequence.tokens)
        values = row[seen]
        with np.errstate(over="ignore"):
            penalised = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[seen] = np.where(np.isinf(values), values, np.clip(penalised, -MAX_LOGIT, MAX_LOGIT))
    if (params.presence_penalty or params.frequency_penalty) and sequence.num_output_tokens:
        ids, counts = np.unique(sequence.tokens[sequence.num_prompt_tokens :], return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(row: NDArray[np.float32], sequence: SampledSequence) -> int:
    """Draws a token by one uniform number and the cumulative weights."""
    # Subtract the largest first: a tiny temperature must not turn large logits into infinities.
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp((row - row.max()) / np.float32(max(sequence.params.temperature, MIN_TEMPERATURE)))
    threshold = _weight_threshold(weights, sequence.params)
    if threshold > 0:
        weights[weights < threshold] = 0
    cumulative = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    # The uniform number is below 1, so the target is below the total, and the token found has a weight above 0.
    target = uniform(sequence.seed, len(sequence.tokens)) * cumulative[-1]
    # A row of which nothing is left has NaNs for weights, and finds nothing.
    return min(int(np.searchsorted(cumulative, target, side="right")), len(row) - 1)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on these two: the first of numpy's Philox with them as its key.

    Written out, because making a generator takes three times as long as ten rounds.
    """
    a, b, c, d = 1, 0, 0, 0
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (right >> 64) ^ b ^ seed, right & _64_BITS, (left >> 64) ^ d ^ position, left & _64_BITS
        seed, position = (seed + 0x9E3779B97F4A7C15) & _64_BITS, (position + 0xBB67AE8584CAA73B) & _64_BITS
    return (a >> 12) * 2.0**-52


def _weight_threshold(weights: NDArray[np.float32], params: SamplingParams) -> np.float32:
    """The lowest weight within min-p, then top-k, then top-p, where the likeliest token weighs 1.

    Tokens of equal weight are in or out together: the order of a sort must not decide.
    """
    threshold = np.float32(params.min_p)
    if 0 < params.top_k < len(weights):
        threshold = max(threshold, np.partition(weights, -params.top_k)[-params.top_k])
    if params.top_p < 1:
        likeliest_first = np.sort(weights[weights >= threshold])[::-1]
        sums = np.cumsum(likeliest_first, dtype=np.float64)
        # The token that brings the sum to top_p is the last one in.
        threshold = likeliest_first[np.searchsorted(sums, params.top_p * sums[-1])]
    return threshold
