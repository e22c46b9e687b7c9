"""Rotary positions as one complex multiplication over a whole row of queries, keys and values.

A checkpoint pairs value i of a head with value i + rotary_dim / 2. `interleave` reorders a projection's outputs so that
pairs lie side by side: then a row is an array of complex numbers, and rotating is multiplying. Scores do not change,
since queries and keys are reordered alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evenflow.model.config import FrequencyFactors, LinearScaling, Llama3Scaling, ModelConfig, RopeConfig, YarnScaling


def interleave(per_head: Tensor, rotary_dim: int) -> Tensor:
    """Reorder dimension 1 (the values of a head) from (i, i + rotary_dim / 2) pairs to neighbours."""
    half = rotary_dim // 2
    pairs = torch.arange(rotary_dim).view(2, half).t().flatten()
    order = torch.cat((pairs, torch.arange(rotary_dim, per_head.shape[1])))
    return per_head[:, order]


def frequencies(rope: RopeConfig) -> Tensor:
    """The angle that a position adds to each pair, fastest first."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, dtype=torch.float32)
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope, scaling)


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_position * plain / (2 * math.pi)
    transition = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / transition).clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn(plain: Tensor, rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    def pair_with(turns: float) -> float:
        """Index of the pair that makes this many turns over the original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


class Rotation:
    """Rotates the queries and keys of packed rows [queries, keys, values], in the first rotary_dim of each head."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_rotated_heads = config.num_heads + config.num_kv_heads
        self._num_heads = config.num_heads + 2 * config.num_kv_heads
        self._half_head = config.head_dim // 2
        self._frequencies = frequencies(config.rope)
        scaling = config.rope.scaling
        self._magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling | FrequencyFactors) else 1.0

    def rotations(self, positions: Tensor) -> Tensor:
        """Complex factors of a head's pairs, one row per position; `positions` is float32."""
        angles = positions.unsqueeze(1) * self._frequencies
        return torch.polar(torch.full_like(angles, self._magnitude), angles)

    def factors(self, rotations: Tensor) -> Tensor:
        """Complex factors of whole packed rows."""
        rows, num_pairs = rotations.shape
        factors = torch.ones(rows, self._num_heads, self._half_head, dtype=torch.complex64)
        factors[:, : self._num_rotated_heads, :num_pairs] = rotations.unsqueeze(1)
        return factors.view(rows, -1)


def rotate_(packed: Tensor, factors: Tensor) -> None:
    """Rotate packed rows in place."""
    packed.view(torch.complex64).mul_(factors)
