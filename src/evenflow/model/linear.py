"""Linear layers of a fixed weight, in the form that runs fastest here for each number of rows.

Knows matrices; knows nothing of the model they belong to.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class Linear(Protocol):
    """x -> x @ weight.T + bias, for rows of x."""

    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """The residual plus this layer's output; the residual's own memory may be used for it."""
        ...


class PlainLinear:
    """The weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._transposed = weight.t()

    def __call__(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self._weight, self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        if self._bias is not None:
            residual.add_(self._bias)
        return residual.addmm_(rows, self._transposed)
