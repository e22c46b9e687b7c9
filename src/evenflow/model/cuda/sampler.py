"""Logits to tokens on the device, for all sampled rows of a step, without waiting for it.

The rules are those of `model.sampler`. Greedy rows cost one search for the largest logits; all others are computed
together, in groups to bound memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenflow.errors import InvalidRequest
from evenflow.model.cuda.logprobs import Logprobs, logprobs_of, start_copy
from evenflow.model.sampler import (
    MAX_LOGIT,
    MIN_TEMPERATURE,
    SampledSequence,
    Samples,
    allowed_next,
    logit_faults,
    uniform,
)

ToDevice = Callable[[NDArray[np.generic]], Tensor]

GROUP_ROWS = 64  # rows of logits copied at a time


@dataclass
class DeviceSequence:
    """A running sequence. Its last tokens may be only on the device: see `sampled`."""

    slot: int
    sampled: SampledSequence
    history: Tensor | None  # its tokens on the device, for penalties
    row_sum: Tensor | None = None  # of the rows so far, for an embedding

    @classmethod
    def of(cls, slot: int, sampled: SampledSequence, max_tokens: int, to_device: ToDevice) -> DeviceSequence:
        params = sampled.params
        history = None
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            known = to_device(np.array(sampled.tokens, dtype=np.int64))
            history = torch.empty(max_tokens, dtype=torch.int64, device=known.device)
            history[: len(known)] = known
        return cls(slot, sampled, history)

    @cached_property
    def is_plain(self) -> bool:
        """Whether it needs only the most likely token."""
        params = self.sampled.params
        is_free = self.history is None and self.sampled.rules is None and self.sampled.constraint is None
        return is_free and params.temperature == 0 and not params.min_tokens and params.logprobs is None

    @cached_property
    def follows_output(self) -> bool:
        """Whether the host needs all earlier tokens to determine the allowed next ones."""
        rules = self.sampled.rules
        return self.sampled.constraint is not None or (rules is not None and rules.follows_output)


@dataclass(slots=True)
class PendingSamples:
    """Samples being copied to the host."""

    numbers: Tensor  # int32: a row of tokens, and one of the largest logits' bits
    errors: dict[int, str]
    logprobs: list[tuple[list[int], list[int | None], Logprobs]] = field(default_factory=list)

    def read(self) -> Samples:
        """Read the samples; call only after the device has reached them."""
        tokens, bits = self.numbers
        faults = logit_faults(bits.view(torch.float32).tolist())
        failed = faults.keys() | self.errors.keys()
        found = {
            row: logprobs.row(number, count)
            for rows, num_top, logprobs in self.logprobs
            for number, (row, count) in enumerate(zip(rows, num_top, strict=True))
            if row not in failed
        }
        return Samples(tokens.tolist(), self.errors, faults, found)


class DeviceSampler:
    def __init__(self, to_device: ToDevice) -> None:
        self._to_device = to_device

    def sample(
        self, logits: Tensor, likeliest: Tensor, sequences: Sequence[DeviceSequence]
    ) -> tuple[Tensor, PendingSamples]:
        """Sample a token for each row, on the device and copied to the host. Padding rows are ignored.

        `likeliest`: the result of `Operations.largest`.
        """
        numbers_of_rows = likeliest[:, : len(sequences)]
        errors: dict[int, str] = {}
        logprobs = []
        others = [row for row, sequence in enumerate(sequences) if not sequence.is_plain]
        if others:
            numbers_of_rows = numbers_of_rows.clone()
        tokens = numbers_of_rows[0]
        for first in range(0, len(others), GROUP_ROWS):
            numbers = others[first : first + GROUP_ROWS]
            group, rows = [sequences[number] for number in numbers], self._to_device(np.array(numbers))
            scores = logits.index_select(0, rows)
            chosen = self._choose(scores, group, numbers, errors)
            tokens[rows] = chosen.int()
            wanted = [place for place, one in enumerate(group) if one.sampled.params.logprobs is not None]
            if wanted:
                places = self._to_device(np.array(wanted))
                num_top = [group[place].sampled.params.logprobs for place in wanted]
                found = logprobs_of(logits.index_select(0, rows[places]), chosen[places], num_top)
                logprobs.append(([numbers[place] for place in wanted], num_top, found.to_host()))
        self._append(tokens, sequences)
        return tokens, PendingSamples(start_copy(numbers_of_rows), errors, logprobs)

    @staticmethod
    def _append(tokens: Tensor, sequences: Sequence[DeviceSequence]) -> None:
        """Append each token to its sequence's history, if any, in one call."""
        ends = [
            (row, sequence.history[len(sequence.sampled.tokens) :][:1])
            for row, sequence in enumerate(sequences)
            if sequence.history is not None
        ]
        if ends:
            new = tokens.unsqueeze(1).unbind()
            torch._foreach_copy_([end for _, end in ends], [new[row] for row, _ in ends])

    def _choose(
        self, scores: Tensor, group: Sequence[DeviceSequence], numbers: Sequence[int], errors: dict[int, str]
    ) -> Tensor:
        """Overwrites `scores`, a copy of these rows' logits."""
        self._constrain(scores, group, numbers, errors)
        self._penalise(scores, group)
        tokens = scores.argmax(-1)
        drawn = [place for place, sequence in enumerate(group) if sequence.sampled.params.temperature > 0]
        if drawn:
            places = self._to_device(np.array(drawn))
            tokens[places] = self._draw(scores.index_select(0, places), [group[place].sampled for place in drawn])
        return tokens

    def _constrain(
        self, scores: Tensor, group: Sequence[DeviceSequence], numbers: Sequence[int], errors: dict[int, str]
    ) -> None:
        masks: dict[int, NDArray[np.bool_]] = {}
        forbidden, biased, biases = [], [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
        vocab_size = scores.shape[1]
        for place, sequence in enumerate(group):
            sampled = sequence.sampled
            try:
                allowed = allowed_next(sampled)
            except InvalidRequest as error:
                errors[numbers[place]] = str(error)
                continue
            if allowed is not None:
                masks[place] = allowed
            elif sampled.may_not_stop:
                forbidden += [place * vocab_size + token for token in sampled.stop_token_ids]
            if sampled.rules is not None and len(sampled.rules.biased_ids):
                biased.append(place * vocab_size + sampled.rules.biased_ids)
                biases.append(sampled.rules.biases)
        if masks:
            places = self._to_device(np.array(list(masks)))
            allowed_tokens = self._to_device(np.stack(list(masks.values())))
            scores[places] = scores[places].masked_fill_(~allowed_tokens, -torch.inf)
        flat = scores.view(-1)
        if forbidden:
            flat.index_fill_(0, self._to_device(np.array(forbidden)), -torch.inf)
        if len(biased) > 1:
            flat.index_add_(0, self._to_device(np.concatenate(biased)), self._to_device(np.concatenate(biases)))

    def _penalise(self, scores: Tensor, group: Sequence[DeviceSequence]) -> None:
        """Apply penalties: repetition counts all tokens, presence and frequency only the output."""
        penalised = [(place, one.history, one.sampled) for place, one in enumerate(group) if one.history is not None]
        if not penalised:
            return
        histories = [history[: len(sampled.tokens)] for _, history, sampled in penalised]
        lengths = [len(sampled.tokens) for _, _, sampled in penalised]
        outputs = [np.arange(len(sampled.tokens)) >= sampled.num_prompt_tokens for _, _, sampled in penalised]
        rows = np.repeat(np.arange(len(penalised)) * scores.shape[1], lengths)
        flat = torch.cat(histories).add_(self._to_device(rows))
        is_output = self._to_device(np.concatenate(outputs).astype(np.float32))
        places = self._to_device(np.array([place for place, _, _ in penalised]))
        values = scores.index_select(0, places)
        seen = torch.zeros_like(values, dtype=torch.bool)
        seen.view(-1).index_fill_(0, flat, True)
        counts = torch.zeros_like(values)
        counts.view(-1).index_add_(0, flat, is_output)
        repetition, presence, frequency = self._columns(
            [
                (sampled.params.repetition_penalty, sampled.params.presence_penalty, sampled.params.frequency_penalty)
                for _, _, sampled in penalised
            ]
        )
        repeated = torch.where(values > 0, values / repetition, values * repetition).clamp_(-MAX_LOGIT, MAX_LOGIT)
        values = torch.where(seen & ~values.isinf(), repeated, values)
        scores[places] = values - (presence * (counts > 0) + frequency * counts)

    def _draw(self, scores: Tensor, sequences: Sequence[SampledSequence]) -> Tensor:
        """Draw by one uniform number and the cumulative weights of each row; see `model.sampler`."""
        params = [sequence.params for sequence in sequences]
        temperatures, min_p = self._columns([(max(one.temperature, MIN_TEMPERATURE), one.min_p) for one in params])
        weights = scores.sub_(scores.amax(-1, keepdim=True)).div_(temperatures).exp_()
        threshold = min_p
        if any(one.top_k or one.top_p < 1 for one in params):
            top_k = self._to_device(np.array([[one.top_k] for one in params]))
            top_p = self._to_device(np.array([[one.top_p] for one in params]))
            threshold = _threshold(weights, min_p, top_k, top_p)
        weights.masked_fill_(weights < threshold, 0)
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        numbers = np.array([[uniform(sequence.seed, len(sequence.tokens))] for sequence in sequences])
        target = self._to_device(numbers) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(1)
        # A row of NaNs finds none. It fails, but a step in flight still feeds its token.
        return tokens.clamp_(max=scores.shape[1] - 1)

    def _columns(self, rows: Sequence[tuple[float, ...]]) -> tuple[Tensor, ...]:
        """Each as [rows, 1], in float32."""
        return self._to_device(np.array(rows, dtype=np.float32)).t().unsqueeze(2).unbind()


def _threshold(weights: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest weight within min-p, then top-k, then top-p. Tokens of equal weight are in or out together."""
    ordered = weights.sort(dim=-1, descending=True).values
    vocab_size = ordered.shape[1]
    kth = ordered.gather(1, (top_k - 1).clamp(0, vocab_size - 1))
    threshold = torch.where((top_k > 0) & (top_k < vocab_size), torch.maximum(min_p, kth), min_p)
    sums = ordered.masked_fill_(ordered < threshold, 0).cumsum(-1, dtype=torch.float64)
    # The token that reaches top_p is the last one kept.
    last = torch.searchsorted(sums, top_p * sums[:, -1:]).clamp_(max=vocab_size - 1)
    return torch.where(top_p < 1, ordered.gather(1, last), threshold)
