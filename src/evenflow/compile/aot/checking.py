"""Checks a compiled model before it is used: its package loads, and its logits match the plain model's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from evenflow.compile.aot.compiled_model import CompiledModel

_MAX_ROWS = 64  # of logits compared: all rows of a long example may not fit
_PADDED_LENGTHS = (16, 9)

# Largest difference of a logit, as a share of the largest logit.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

# The end of torch._inductor.aoti_load_package: importing all of Inductor would take several times as long.
_LOAD = "import sys, torch; torch._C._aoti.AOTIModelPackageLoader(sys.argv[1], 'model', False, 1, -1)"
_LOAD_TIMEOUT_S = 300.0


class WrongAnswer(Exception):
    """A compiled model differs from the plain one by more than its precision explains."""


def why_not_loadable(package: Path) -> str | None:
    """How the package kills a process that loads it, tried in a new one; None if it does not.

    Errors that the loader reports do no harm: loading the package here raises them.
    """
    command = [sys.executable, "-c", _LOAD, str(package)]
    try:
        trial = subprocess.run(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, timeout=_LOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"loading the compiled package takes over {_LOAD_TIMEOUT_S:.0f} s"
    if trial.returncode >= 0:
        return None
    return (
        f"loading the compiled package ends a process with {signal.Signals(-trial.returncode).name}; "
        f"{os.environ.get('CXX', 'g++')} may be faulty, for example link a C++ library of its own: "
        "set the environment variable CXX to another compiler"
    )


@torch.no_grad()
def largest_difference(plain: Any, compiled: CompiledModel, example: dict[str, Tensor]) -> float:
    """Over the example, a step after it, and two sequences padded on the left; WrongAnswer if it is too large."""
    rows = min(_MAX_ROWS, example["input_ids"].shape[1])
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
    """Over two steps after the example, on static caches; WrongAnswer if it is too large."""
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
    if not difference <= allowed:  # NaN included
        raise WrongAnswer(f"logits of {what} differ by {difference:.2g} where {allowed:.2g} is allowed")
    return difference


def _longer_mask(example: dict[str, Tensor]) -> dict[str, Tensor]:
    mask = example.get("attention_mask")
    return {} if mask is None else {"attention_mask": torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)}


def _padded(input_ids: Tensor) -> tuple[Tensor, Tensor]:
    longest = max(_PADDED_LENGTHS)
    tokens = input_ids[:1].repeat(len(_PADDED_LENGTHS), -(-longest // input_ids.shape[1]))[:, :longest].clone()
    positions = torch.arange(longest, device=input_ids.device)
    return tokens, torch.stack([positions >= longest - length for length in _PADDED_LENGTHS])
