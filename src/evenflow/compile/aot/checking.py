"""Compares a compiled model with the plain one before anybody relies on it.

Must not know: how it was compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from evenflow.compile.aot.compiled_model import CompiledModel

_MOST_ROWS = 64  # of logits that are compared: all rows of a long example may not fit
_PADDED_LENGTHS = (16, 9)

# Largest difference of a logit, as a share of the largest logit.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class WrongAnswer(Exception):
    """A compiled model differs from the plain one by more than its precision explains."""


@torch.no_grad()
def largest_difference(plain: Any, compiled: CompiledModel, example: dict[str, Tensor]) -> float:
    """Over the example, a step after it, and two sequences padded on the left; WrongAnswer where it is too large."""
    rows = min(_MOST_ROWS, example["input_ids"].shape[1])
    wanted, got = (run(**example, use_cache=True, logits_to_keep=rows) for run in (plain, compiled))
    differences = [_difference("the example", got.logits, wanted.logits)]
    step = {"input_ids": wanted.logits[:, -1:].argmax(-1), **_longer_mask(example)}
    wanted = plain(**step, past_key_values=wanted.past_key_values)
    got = compiled(**step, past_key_values=got.past_key_values)
    differences.append(_difference("the step after the example", got.logits, wanted.logits))
    tokens, mask = _padded(example["input_ids"])
    wanted, got = (run(tokens, attention_mask=mask) for run in (plain, compiled))
    differences.append(_difference("a padded batch", got.logits[mask], wanted.logits[mask]))
    return max(differences)


@torch.no_grad()
def largest_step_difference(plain: Any, recorded: Any, example: dict[str, Tensor]) -> float:
    """Over two steps after the example, on static caches."""
    tokens = example["input_ids"]
    runs = []
    for run in (plain, recorded):
        cache = StaticCache(config=plain.config.get_text_config(), max_cache_len=tokens.shape[1] + 2)
        plain(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        runs.append([run(input_ids=tokens[:, :1], past_key_values=cache).logits for _ in range(2)])
    return max(_difference("a recorded step", got, wanted) for wanted, got in zip(*runs, strict=True))


def _difference(what: str, got: Tensor, wanted: Tensor) -> float:
    difference = float((got - wanted).abs().max())
    allowed = _TOLERANCE.get(wanted.dtype, 1e-2) * max(1.0, float(wanted.abs().max()))
    if not difference <= allowed:  # also where it is no number
        raise WrongAnswer(f"logits of {what} differ by {difference:.2g} where {allowed:.2g} is allowed")
    return difference


def _longer_mask(example: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = example.get("attention_mask")
    return {} if mask is None else {"attention_mask": torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)}


def _padded(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    longest = max(_PADDED_LENGTHS)
    tokens = input_ids[:1].repeat(len(_PADDED_LENGTHS), -(-longest // input_ids.shape[1]))[:, :longest].clone()
    places = torch.arange(longest, device=input_ids.device)
    mask = torch.stack([places >= longest - length for length in _PADDED_LENGTHS])
    return tokens, mask
