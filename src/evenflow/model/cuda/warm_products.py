"""Runs matrix products of many sizes once, before a host engine's first request.

CUDA loads a kernel at its first launch and waits for the whole device. Libraries switch kernels every few rows, so
without this all streams would wait an extra step at each new number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Product = Callable[[Tensor], object]


@torch.inference_mode()
def warm_up(products: Iterable[tuple[Product, Tensor]], sizes: Sequence[int]) -> float:
    """Run each product at each size; returns the seconds."""
    started = time.perf_counter()
    for product, rows in products:
        for size in sizes:
            product(rows[:size])
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter() - started


def warm_up_logits(compute: Product, hidden: Tensor) -> str:
    """Run the output layer at all row counts up to these; returns a line for the log."""
    seconds = warm_up([(compute, hidden)], range(len(hidden), 0, -1))
    return f"evenflow: logits of {len(hidden)} batch sizes in {seconds:.1f} s"
