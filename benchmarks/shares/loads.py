"""Loads of several tenants and classes: drawn from a seed, or from traces that a user has."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from virtual_engine import Arrival, Device

from evenflow.errors import InvalidInput
from evenflow.workload.inputs import TraceRequest
from evenflow.workload.reading import ReadTally, read_inputs

Sizes = Callable[[random.Random], tuple[int, int]]  # tokens of a prompt and of its output


def trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace that say what they generate."""
    found = [
        one
        for one in read_inputs(path, None, ReadTally())
        if isinstance(one, TraceRequest) and one.num_output_tokens and one.arrival_s is not None
    ]
    if not found:
        raise InvalidInput(f"Got {str(path)!r} but it holds no requests with arrival times and output lengths.")
    return sorted(found, key=lambda one: one.arrival_s or 0.0)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def drawn_sizes(prompt: tuple[int, int], output: tuple[int, int]) -> Sizes:
    return lambda rng: (log_uniform(rng, *prompt), log_uniform(rng, *output))


def traced_sizes(requests: Sequence[TraceRequest]) -> Sizes:
    def draw(rng: random.Random) -> tuple[int, int]:
        one = rng.choice(requests)
        return one.num_prompt_tokens, one.num_output_tokens or 1

    return draw


def poisson(rng: random.Random, sizes: Sizes, tokens_per_s: float, seconds: float, tenant: str) -> list[Arrival]:
    """Random arrivals that bring this many tokens a second."""
    sample = [sum(sizes(rng)) for _ in range(400)]
    mean_gap_s = sum(sample) / len(sample) / tokens_per_s
    found, at = [], rng.expovariate(1 / mean_gap_s)
    while at < seconds:
        found.append(Arrival(at, *sizes(rng), tenant=tenant))
        at += rng.expovariate(1 / mean_gap_s)
    return found


def compress(
    requests: Sequence[TraceRequest], device: Device, load: float, seconds: float, first: int
) -> list[Arrival]:
    """Requests of a trace from the `first` on, with arrivals closer together, so that they ask for `load` times what
    the device can do."""
    found: list[Arrival] = []
    work, start = 0.0, requests[first].arrival_s or 0.0
    for one in requests[first:]:
        at = (one.arrival_s or 0.0) - start
        found.append(Arrival(at, one.num_prompt_tokens, one.num_output_tokens or 1, block_ids=one.block_ids))
        work += device.seconds_alone(found[-1])
        if work >= load * seconds:
            break
    scale = seconds / max(found[-1].at, 1e-9)
    return [replace(one, at=one.at * scale) for one in found]


def with_classes(rng: random.Random, arrivals: Iterable[Arrival], odds: dict[str, float]) -> list[Arrival]:
    names, weights = list(odds), list(odds.values())
    return [replace(one, service_class=rng.choices(names, weights)[0]) for one in arrivals]
