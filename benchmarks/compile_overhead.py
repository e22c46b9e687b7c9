"""What the chunked wrapper costs on inputs that it does not cut, in microseconds per call.

The wrapped module does nothing, so that only the wrapper is timed. Rounds alternate; the fastest of each counts, in
processor time, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch

from evenflow.compile import ChunkedPrefillOptimizer, ChunkedPrefillWrapper

_CALLS, _ROUNDS = 2000, 30
_LENGTHS = (1, 47, 500, 2048)


class Nothing(torch.nn.Module):
    """Takes a model's arguments and returns at once."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, past_key_values: Any = None) -> None:
        return None


def microseconds(call: Callable[..., Any], arguments: dict[str, Any]) -> float:
    started = time.process_time()
    for _ in range(_CALLS):
        call(**arguments)
    return (time.process_time() - started) / _CALLS * 1e6


def measure(length: int) -> dict[str, float]:
    plain = Nothing()
    wrapped = ChunkedPrefillWrapper(plain, ChunkedPrefillOptimizer(), "nothing")
    tokens = torch.zeros(1, length, dtype=torch.long)
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    rounds = [(microseconds(plain, arguments), microseconds(wrapped, arguments)) for _ in range(_ROUNDS)]
    plain_us, wrapped_us = (min(times) for times in zip(*rounds, strict=True))
    return {"tokens": length, "plain_us": plain_us, "wrapped_us": wrapped_us, "overhead_us": wrapped_us - plain_us}


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps([measure(length) for length in _LENGTHS], indent=2))
