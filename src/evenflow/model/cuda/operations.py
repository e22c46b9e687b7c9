"""The operations between a layer's matrix products. `kernels` has them for GPUs, `reference_ops` in plain torch.

None of them waits for the device, so that a graph can capture them.
"""

from __future__ import annotations

from typing import Protocol

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
        """Norm and rotate queries and keys, write keys and values to KV memory; returns the queries.

        `packed` has rows of [queries, keys, values], with the rotary pairs of a head side by side (see `model.rope`).
        `slots` has each row's entry of `kv`, block * block size + offset. `rotation` has cos and sin, float32
        [rows, rotary dim / 2]; None for a layer without positions. `query_key_norm` has the weights of the queries' and
        the keys' RMSNorm.
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SiLU of the first half of each row times its second half."""
