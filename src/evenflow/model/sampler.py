"""Logits to tokens, for all sampled rows of a step at once.

Knows one row's sampling parameters and tokens; must not know: requests, slots, the model.

A row's random number is keyed by (seed, position) alone, so that neither the batch nor the chunks it was computed in
can change the token. Logprobs are those of the model's own distribution, before grammars, penalties, temperature
and cuts.
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

from evenflow.core.plan import RowLogprobs, TokenLogprob
from evenflow.core.request import SamplingParams
from evenflow.errors import InvalidRequest

if TYPE_CHECKING:
    from evenflow.model.grammar import Constraint

_LEAST_TEMPERATURE = 1e-30  # what is smaller may be 0 as a float32


@dataclass(slots=True)
class SampledSequence:
    """What sampling needs of one sequence."""

    params: SamplingParams
    seed: int
    tokens: list[int]  # everything known
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
    constraint: Constraint | None = None
    has_penalties: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        self.has_penalties = (
            params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def may_not_stop(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and bool(self.stop_token_ids)


@dataclass(slots=True)
class Samples:
    """A token a row, and by row number what was asked for or went wrong. The token of a failed row means nothing."""

    tokens: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)


def sample(logits: Tensor, sequences: Sequence[SampledSequence]) -> Samples:
    """One token for each row of `logits`, which is overwritten."""
    errors = _errors(logits)
    raw = {
        row: logits[row].log_softmax(-1)
        for row, sequence in enumerate(sequences)
        if sequence.params.logprobs is not None and row not in errors
    }
    # The same memory: over one vocabulary, numpy's argmax and partitions are several times as fast as torch's.
    rows: NDArray[np.float32] = logits.numpy()
    for number, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if sequence.constraint is not None and number not in errors:
            try:
                _constrain(row, sequence, sequence.constraint)
            except InvalidRequest as error:
                errors[number] = str(error)
        elif sequence.may_not_stop:
            row[list(sequence.stop_token_ids)] = -math.inf
        if sequence.has_penalties:
            _penalise(row, sequence)
    tokens: list[int] = rows.argmax(-1).tolist()
    for number, sequence in enumerate(sequences):
        if sequence.params.temperature > 0 and number not in errors:
            tokens[number] = _draw(rows[number], sequence)
    logprobs = {row: row_logprobs(logprob, tokens[row], sequences[row].params.logprobs) for row, logprob in raw.items()}
    return Samples(tokens, errors, logprobs)


def row_logprobs(logprobs: Tensor, token: int, num_top: int | None) -> RowLogprobs:
    """The token's logprob and the `num_top` likeliest, from a row of log-probabilities."""
    values, ids = logprobs.topk(min(num_top or 0, len(logprobs)))
    top = tuple(map(TokenLogprob, ids.tolist(), values.tolist()))
    return RowLogprobs(TokenLogprob(token, float(logprobs[token])), top)


def _errors(logits: Tensor) -> dict[int, str]:
    """Rows whose largest value is not a number at all, or not finite."""
    largest: list[float] = logits.amax(-1).tolist()
    return {
        row: f"The model gave no usable logits: their largest value is {value}."
        for row, value in enumerate(largest)
        if not math.isfinite(value)
    }


def _constrain(row: NDArray[np.float32], sequence: SampledSequence, constraint: Constraint) -> None:
    """Leave what the grammar allows; `min_tokens` are waived where it allows nothing but an end."""
    allowed = constraint.allowed(sequence.tokens, sequence.num_prompt_tokens)
    if sequence.may_not_stop:
        goes_on = allowed.copy()
        goes_on[list(sequence.stop_token_ids)] = False
        allowed = goes_on if goes_on.any() else allowed
    np.copyto(row, -np.inf, where=~allowed)


def _penalise(row: NDArray[np.float32], sequence: SampledSequence) -> None:
    """Repetition counts all tokens, as in Hugging Face; presence and frequency count the output, as at OpenAI."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = np.unique(sequence.tokens)
        values = row[seen]
        row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output = sequence.tokens[sequence.num_prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(output, return_counts=True)
        row[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _draw(row: NDArray[np.float32], sequence: SampledSequence) -> int:
    """One uniform number picks from the cumulated weights of the tokens that are kept."""
    # The largest is taken off first: a tiny temperature must not turn large logits into infinities.
    weights = np.exp((row - row.max()) / np.float32(max(sequence.params.temperature, _LEAST_TEMPERATURE)))
    least = _least_weight(weights, sequence.params)
    if least > 0:
        weights[weights < least] = 0
    cumulated = torch.from_numpy(weights).cumsum(0, dtype=torch.float64).numpy()
    # The uniform number is below 1, so the target is below the total, and what is found has a weight above 0.
    target = _uniform(sequence.seed, len(sequence.tokens)) * cumulated[-1]
    return int(np.searchsorted(cumulated, target, side="right"))


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on these two alone."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
    return float(bits >> 12) * 2.0**-52


def _least_weight(weights: NDArray[np.float32], params: SamplingParams) -> np.float32:
    """What a token must weigh to be inside min-p, then top-k, then top-p, where the likeliest weighs 1.

    Tokens that weigh the same are in or out together: the order of a sort must not decide.
    """
    least = np.float32(params.min_p)
    if 0 < params.top_k < len(weights):
        least = max(least, np.partition(weights, -params.top_k)[-params.top_k])
    if params.top_p < 1:
        likeliest_first = np.sort(weights[weights >= least])[::-1]
        sums = np.cumsum(likeliest_first, dtype=np.float64)
        # The token that brings the sum to top_p is the last one in.
        least = likeliest_first[np.searchsorted(sums, params.top_p * sums[-1])]
    return least
