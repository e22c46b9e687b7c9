"""Computes the logits of every batch size once, before the first request of a host engine.

CUDA loads a kernel when it is first launched, and waits for the whole device meanwhile. The output layer has a kernel
for every few batch sizes, so without this each new record of streams makes all of them wait for one step more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


@torch.inference_mode()
def warm_up_logits(compute: Callable[[Tensor], object], hidden: Tensor) -> str:
    """Of all numbers of these rows; returns a line for the log."""
    started = time.perf_counter()
    for size in range(len(hidden), 0, -1):
        compute(hidden[:size])
    return f"evenflow: logits of {len(hidden)} batch sizes in {time.perf_counter() - started:.1f} s"
