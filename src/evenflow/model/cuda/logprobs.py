"""Log-probabilities of many rows at once, on the device, and their copies on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evenflow.core.logprobs import LogprobRows
from evenflow.core.request import ALL_LOGPROBS
from evenflow.model.sampler import pack_rows


class Logprobs(NamedTuple):
    """By row: the chosen token's logprob, and the most likely tokens with theirs, best first."""

    chosen_ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def to_host(self) -> Logprobs:
        """Start copies, readable once the device has reached them."""
        return Logprobs(*map(start_copy, self))

    def rows(self, num_top: int | None) -> LogprobRows:
        """On the host, for each row: the chosen token and the requested number of most likely ones."""
        end = _slice_end(num_top)
        ids = torch.cat([self.chosen_ids.unsqueeze(1), self.top_ids[:, :end]], 1)
        return pack_rows(ids, torch.cat([self.chosen.unsqueeze(1), self.top[:, :end]], 1))

    def row(self, number: int, num_top: int | None) -> LogprobRows:
        return Logprobs(*(column[number : number + 1] for column in self)).rows(num_top)


def logprobs_of(logits: Tensor, chosen_ids: Tensor, num_top: Sequence[int | None]) -> Logprobs:
    """Log-probabilities of raw logits, before sampling rules."""
    vocab_size = logits.shape[-1]
    width = max(min(_slice_end(count) or 0, vocab_size) if count != ALL_LOGPROBS else vocab_size for count in num_top)
    total = _log_sum_exp(logits)
    top, top_ids = logits.topk(width)
    chosen = logits.gather(1, chosen_ids.unsqueeze(1)) - total
    return Logprobs(chosen_ids, chosen.squeeze(1), top_ids, top - total)


def _log_sum_exp(logits: Tensor) -> Tensor:
    """By row, with the same bits in any batch: torch's reduction chooses its order of sums by the number of rows."""
    largest = logits.amax(-1, keepdim=True)
    sums = (logits - largest).exp_()
    while (width := sums.shape[-1]) > 1:
        half = (width + 1) // 2
        sums[:, : width - half] += sums[:, half:]
        sums = sums[:, :half]
    return sums.log() + largest


def _slice_end(count: int | None) -> int | None:
    """The count as the end of a slice."""
    return None if count == ALL_LOGPROBS else count or 0


def start_copy(tensor: Tensor) -> Tensor:
    """Copy to the host without waiting for the device; readable after an event recorded later."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
