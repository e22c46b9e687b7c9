"""The operations between a layer's matrix products: what each computes. `reference` has them in plain torch.

All run on the device without waiting for it, so that a graph can capture them.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Operations(Protocol):
    """Sums and norms are computed in float32 and rounded once, to the type of the rows."""

    def add_rms_norm(self, residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add `update` to the residual in place; returns RMSNorm of the sum, times `weight`. [rows, hidden size]."""

    def rope_and_write_kv(
        self,
        qkv: Tensor,
        kv: Tensor,
        entries: Tensor,
        positions: Tensor,
        rotations: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """Norm and rotate the queries and keys of `qkv`, write its keys and values, return its queries.

        qkv        [rows, (heads + 2 * KV heads) * head dim]: a row's queries, keys and values
        kv         one layer's KV memory; see `attention`
        entries    int32 [rows]: block * block size + entry in the block
        positions  int32 [rows]
        rotations  float32 [positions, rotary dim]: the cosines of a position's pairs, then the sines. Pair i of a head
                   is its values i and i + rotary dim / 2; values from rotary dim on stay as they are. None: no rotation
        norms      weights of an RMSNorm of each query and each key head [head dim], before the rotation; None: no norm

        The queries are contiguous, [rows, heads, head dim].
        """

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] -> [rows, inner]: SiLU of the first half times the second."""
