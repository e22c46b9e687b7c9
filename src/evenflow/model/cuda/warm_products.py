"""Runs matrix products in many sizes once, before the first request of a host engine.

CUDA loads a kernel at its first launch, and waits for the whole device meanwhile. Libraries have another kernel for
every few rows, so without this all streams wait for an extra step whenever a step first has a new number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], object]


@torch.inference_mode()
def warm_up(products: Iterable[tuple[Product, Tensor]], sizes: Sequence[int]) -> float:
    """Run each product with the first of its rows, as many as each size says; returns the seconds."""
    started = time.perf_counter()
    for product, rows in products:
        for size in sizes:
            product(rows[:size])
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def warm_up_logits(compute: Product, hidden: Tensor) -> str:
    """Of all numbers of these rows; returns a line for the log."""
    seconds = warm_up([(compute, hidden)], range(len(hidden), 0, -1))
    return f"evenflow: logits of {len(hidden)} batch sizes in {seconds:.1f} s"
