"""Rotary positions as one complex multiplication over a whole row of queries, keys and values.

Knows frequencies and their scaling; knows no layers and no cache.

A checkpoint pairs value i of a head with value i + rotary_dim / 2. `interleave` reorders a projection's outputs so that
pairs lie side by side: then a row is an array of complex numbers, and turning it is multiplying it. Scores do not
change, since queries and keys are reordered alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from evenflow.model.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)


def interleave(per_head: Tensor, rotary_dim: int) -> Tensor:
    """Reorder dimension 1 (the values of a head) from (i, i + rotary_dim / 2) pairs to neighbours."""
    half = rotary_dim // 2
    pairs = torch.arange(rotary_dim).view(2, half).t().flatten()
    order = torch.cat((pairs, torch.arange(rotary_dim, per_head.shape[1])))
    return per_head[:, order]


def frequencies(rope: RopeConfig) -> Tensor:
    """The angle a position adds to each pair, fastest first."""
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
    passage = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / passage).clamp(0.0, 1.0)
    return plain * kept + plain / scaling.factor * (1 - kept)


def _yarn(plain: Tensor, rope: RopeConfig, scaling: YarnScaling) -> Tensor:
    def pair_that_turns(times: float) -> float:
        """Index of the pair that makes so many turns over the original context."""
        wavelength = scaling.original_max_position / (times * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return plain / scaling.factor * interpolated + plain * (1 - interpolated)


class Rotation:
    """Turns packed rows of heads: [queries, keys, values]. Values, and what lies behind rotary_dim, are left alone."""

    def __init__(self, config: ModelConfig) -> None:
        self._num_turned_heads = config.num_heads + config.num_kv_heads
        self._num_heads = config.num_heads + 2 * config.num_kv_heads
        self._half_head = config.head_dim // 2
        self._frequencies = frequencies(config.rope)
        scaling = config.rope.scaling
        self._magnitude = scaling.attention_factor if isinstance(scaling, YarnScaling | FrequencyFactors) else 1.0

    def turns(self, positions: Tensor) -> Tensor:
        """What to multiply the turning pairs of each head by, one row a position; `positions` is float32."""
        angles = positions.unsqueeze(1) * self._frequencies
        return torch.polar(torch.full_like(angles, self._magnitude), angles)

    def factors(self, turns: Tensor) -> Tensor:
        """What to multiply each whole row by, seen as complex numbers."""
        rows, num_pairs = turns.shape
        factors = torch.ones(rows, self._num_heads, self._half_head, dtype=torch.complex64)
        factors[:, : self._num_turned_heads, :num_pairs] = turns.unsqueeze(1)
        return factors.view(rows, -1)


def turn_(packed: Tensor, factors: Tensor) -> None:
    """Turn rows of packed heads in place."""
    packed.view(torch.complex64).mul_(factors)
