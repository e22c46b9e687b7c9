"""The operations of `kernels` in plain torch: their reference in tests, and the fallback without Triton."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from evenflow.model.cuda.operations import library_linear

linear = library_linear


def add_rms_norm(residual: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `update` to `residual` in place, and return the RMSNorm of the sum; rows are [rows, hidden]."""
    if update is not None:
        residual += update
    return _rms_norm(residual, weight, eps)


def rope_and_write_kv(
    packed: Tensor,
    num_heads: int,
    kv: Tensor,
    slots: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    query_key_norm: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Norm and rotate queries and keys, write keys and values to KV memory; see `kernels.rope_and_write_kv`."""
    block_size, num_kv_heads, head_dim = kv.shape[2:]
    heads = packed.view(packed.shape[0], -1, head_dim)
    queries, keys, values = torch.split_with_sizes(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_key_norm is not None:
        for part, weight in zip((queries, keys), query_key_norm, strict=True):
            part.copy_(_rms_norm(part, weight, eps))
    if rotation is not None:
        cos, sin = (table.unsqueeze(1) for table in rotation)
        rotated = heads[:, : num_heads + num_kv_heads, : 2 * cos.shape[2]]
        first, second = rotated.float().view(*rotated.shape[:2], -1, 2).unbind(3)
        rotated.copy_(torch.stack((first * cos - second * sin, first * sin + second * cos), dim=3).flatten(2))
    real = slots >= 0
    blocks, offsets = slots[real] // block_size, slots[real] % block_size
    kv[blocks, 0, offsets], kv[blocks, 1, offsets] = keys[real].to(kv.dtype), values[real].to(kv.dtype)
    return queries


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of each row times its second half."""
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate) * up


def largest(logits: Tensor) -> Tensor:
    """The most likely token of each row and the bits of its logit, a NaN if the row has one: int32 [2, rows]."""
    values, tokens = logits.max(-1)
    return torch.stack((tokens.int(), values.view(torch.int32)))


def _rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    values = rows.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()).to(rows.dtype)
