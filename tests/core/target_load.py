"""A load in virtual time: chats that decode without end, long prompts that keep coming, and what the chats felt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from evenflow.core.plan import Chunk, ExecutorCaps, StepShape
from evenflow.core.step_time import StepTimeModel
from tests.core.driving import Driver

Cost = Callable[[StepShape], float]


def max_type(shape: StepShape) -> float:
    """A machine bound by memory at few rows and by compute at many: seconds of a step, without noise."""
    memory = 0.008 + 1.2e-7 * shape.decode_context
    compute = 6e-5 * shape.padded_rows + 1.5e-9 * shape.prefill_attention + 2e-5 * shape.logit_rows
    return 0.002 + max(memory, compute) + 3e-5 * shape.attention_calls


def noisy(cost: Cost, share: float = 0.05, seed: int = 1) -> Cost:
    generator = random.Random(seed)
    return lambda shape: cost(shape) * (1 + generator.gauss(0, share))


def disturbed(cost: Cost, seed: int) -> Cost:
    """Noise, and one step in fifty begins a burst of a few that take 1.5 to 4 times as long."""
    generator, noise, slowness = random.Random(seed), noisy(cost, seed=seed), 1.0

    def seconds(shape: StepShape) -> float:
        nonlocal slowness
        if slowness == 1.0:
            slowness = generator.uniform(1.5, 4.0) if generator.random() < 0.02 else 1.0
        elif generator.random() < 0.25:
            slowness = 1.0
        return slowness * noise(shape)

    return seconds


class Oracle(StepTimeModel):
    """Knows the cost without its noise, and allows for the noise as much as the limit on the p99 gap asks for."""

    def __init__(self, cost: Cost, limit: float = 1.1, noise: float = 0.05) -> None:
        super().__init__()
        self._cost = cost
        self._allowance = (1 + 2.33 * noise) / limit
        self.largest_rows_seen = 1 << 30

    def predict(self, shape: StepShape) -> float:
        return self._cost(shape)

    def upper(self, shape: StepShape) -> float:
        return self._cost(shape) * self._allowance

    def observe(self, shape: StepShape, seconds: float) -> None:
        """There is nothing to learn."""


class StepSeen(NamedTuple):
    gap: float  # since the step before
    num_decodes: int
    chunks: tuple[Chunk, ...]

    @property
    def prefill(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass
class Felt:
    """Gaps between a stream's tokens while a prefill was pending, and how fast prefill went."""

    gaps: list[float] = field(default_factory=list)
    chunk_sizes: list[int] = field(default_factory=list)
    prefill_tokens: int = 0
    seconds: float = 0.0

    def percentile(self, share: float) -> float:
        return sorted(self.gaps)[min(len(self.gaps) - 1, int(share * len(self.gaps)))]

    @property
    def prefill_rate(self) -> float:
        return self.prefill_tokens / self.seconds


def start_chats(driver: Driver, num_chats: int, **sampling: float) -> None:
    """Add chats that never end, and let them come to their first tokens."""
    for _ in range(num_chats):
        driver.add(64, max_tokens=100_000, **sampling)
    while driver.scheduler._prefilling or len(driver.scheduler.waiting):
        driver.step()


def busy_steps(driver: Driver, steps: int, prompt: int = 8000) -> Iterator[StepSeen]:
    """Keep one long prompt pending for so many steps."""
    clock = driver.executor.clock
    for _ in range(steps):
        if not driver.scheduler._prefilling and not len(driver.scheduler.waiting):
            driver.add(prompt, max_tokens=1)
        before = clock.now
        driver.step()
        plan = driver.outcomes[-1].plan
        yield StepSeen(clock.now - before, len(plan.decodes), plan.chunks)


def run_load(driver: Driver, *, num_chats: int = 16, prompt: int = 8000, steps: int = 600, skip: int = 60) -> Felt:
    """Keep one long prompt pending and the chats decoding for so many steps; the first `skip` do not count."""
    start_chats(driver, num_chats)
    felt = Felt()
    for number, step in enumerate(busy_steps(driver, steps, prompt)):
        if number >= skip:
            felt.gaps += [step.gap] * step.num_decodes
            felt.chunk_sizes += [chunk.length for chunk in step.chunks]
            felt.prefill_tokens += step.prefill
            felt.seconds += step.gap
    return felt


def target_driver(
    milliseconds: int, cost: Cost, *, depth: int = 1, mode: str = "", row_buckets: tuple[int, ...] = ()
) -> Driver:
    return Driver(
        f"target:{milliseconds}{mode}",
        num_blocks=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        caps=ExecutorCaps(max_steps_in_flight=depth, row_buckets=row_buckets),
        cost=cost,
    )
