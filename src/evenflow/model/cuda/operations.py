"""The interface of a layer's operations besides attention. Three modules implement it: `kernels` for GPUs,
`deterministic` for GPUs with bitwise the same results in any batch, and `reference_ops` in plain torch.

The GPU versions never wait for the device, so graphs can capture them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Operations(Protocol):
    """Implemented by modules. Sums and norms are computed in float32."""

    def add_rms_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `update` to `residual` in place, and return the RMSNorm of the sum; rows are [rows, hidden]."""

    def rope_and_write_kv(
        self,
        packed: Tensor,
        num_heads: int,
        kv: Tensor,
        slots: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        query_key_norm: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """Norm and rotate queries in place, and keys, write keys and values to KV memory; returns the queries.

        `packed` has rows of [queries, keys, values], with the rotary pairs of a head side by side (see `model.rope`).
        `slots` has each row's entry of `kv`, block * block size + offset. `rotation` has cos and sin, float32
        [rows, rotary dim / 2]; None for a layer without positions. `query_key_norm` has the weights of the queries' and
        the keys' RMSNorm.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of each row times its second half."""

    def largest(self, logits: Tensor) -> Tensor:
        """The most likely token of each row and the bits of its logit, a NaN if the row has one: int32 [2, rows]."""

    def linear(self, rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Rows times the weight's rows, plus the bias. With a float32 `out`, sums are not rounded."""


def library_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The fastest product of these sizes; its order of sums depends on the number of rows."""
    if out is None:
        return F.linear(rows, weight, bias)
    if out.dtype != rows.dtype:
        torch.mm(rows, weight.t(), out_dtype=out.dtype, out=out)
        return out if bias is None else out.add_(bias)
    if bias is None:
        return torch.mm(rows, weight.t(), out=out)
    return torch.addmm(bias, rows, weight.t(), out=out)
