"""Logits to tokens, for all sampled rows of a step at once.

Knows one row's sampling parameters and tokens; must not know: requests, slots, the model.

A row's random number is keyed by (seed, position) alone, so that neither the batch nor the chunks it was computed in
can change the token. Logprobs are those of the model's own distribution, before penalties, temperature and cuts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from evenflow.core.plan import RowLogprobs, TokenLogprob
from evenflow.core.request import SamplingParams

_FIRST_CANDIDATES = 512  # tokens sorted at first to find a top-p cut; most cuts lie within


@dataclass(slots=True)
class SampledSequence:
    """What sampling needs of one sequence."""

    params: SamplingParams
    seed: int
    tokens: list[int]  # everything known
    num_prompt_tokens: int
    stop_token_ids: frozenset[int]
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
        for row, s in enumerate(sequences)
        if s.params.logprobs is not None and row not in errors
    }
    for row, sequence in enumerate(sequences):
        if sequence.may_not_stop:
            logits[row, sorted(sequence.stop_token_ids)] = -math.inf
        if sequence.has_penalties:
            _penalise(logits[row], sequence)
    tokens: list[int] = logits.argmax(-1).tolist()
    drawn = [row for row, s in enumerate(sequences) if s.params.temperature > 0 and row not in errors]
    if drawn:
        for row, token in zip(drawn, _draw(logits[drawn], [sequences[row] for row in drawn]), strict=True):
            tokens[row] = token
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


def _penalise(row: Tensor, sequence: SampledSequence) -> None:
    """Repetition counts all tokens, as in Hugging Face; presence and frequency count the output, as at OpenAI."""
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(sequence.tokens)))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    output = sequence.tokens[sequence.num_prompt_tokens :]
    if output and (params.presence_penalty or params.frequency_penalty):
        ids, counts = np.unique(output, return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        row[torch.from_numpy(ids)] -= torch.from_numpy(penalties).float()


def _draw(logits: Tensor, sequences: Sequence[SampledSequence]) -> list[int]:
    """Rows are scaled and cut, then one uniform number a row picks from the cumulated probabilities."""
    temperatures = torch.tensor([[s.params.temperature] for s in sequences])
    # Shifted first: a tiny temperature must not turn large logits into infinities.
    logits = (logits - logits.amax(-1, keepdim=True)).div_(temperatures)
    for row, sequence in zip(logits, sequences, strict=True):
        _cut(row, sequence.params)
    cumulated = logits.softmax(-1, dtype=torch.float64).cumsum_(-1)
    uniform = torch.tensor([[_uniform(s.seed, len(s.tokens))] for s in sequences], dtype=torch.float64)
    # uniform < 1, so the target is below the total, and the token found has a probability above 0.
    tokens: list[int] = torch.searchsorted(cumulated, uniform * cumulated[:, -1:], right=True).flatten().tolist()
    return tokens


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on these two alone."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
    return float(bits >> 12) * 2.0**-52


def _cut(row: Tensor, params: SamplingParams) -> None:
    """Give all tokens outside min-p, top-k and top-p no chance; the likeliest always stays."""
    if params.min_p > 0:
        row[row < row.max() + math.log(params.min_p)] = -math.inf
    if 0 < params.top_k < len(row):
        kept, ids = row.topk(params.top_k)
        row.fill_(-math.inf)
        row[ids] = kept
    if params.top_p < 1:
        _cut_nucleus(row, params.top_p)


def _cut_nucleus(row: Tensor, top_p: float) -> None:
    """Keep the likeliest tokens up to and including the one that brings their sum to `top_p`."""
    total = row.logsumexp(-1)
    num_candidates = min(_FIRST_CANDIDATES, len(row))
    while True:
        kept, ids = row.topk(num_candidates)
        sums = (kept - total).exp().cumsum(-1)
        if num_candidates == len(row) or sums[-1] >= top_p:
            break
        num_candidates = min(num_candidates * 8, len(row))
    num_kept = int((sums < top_p).sum()) + 1
    row.fill_(-math.inf)
    row[ids[:num_kept]] = kept[:num_kept]
