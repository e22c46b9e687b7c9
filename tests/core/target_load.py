"""A load in virtual time: chats that decode without end, long prompts that keep coming, and what the chats felt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, NamedTuple

from evenflow.core.plan import AttentionWaves, Chunk, ExecutorCaps, Shed, StepPlan, StepShape
from evenflow.core.step_time import StepTimeModel
from tests.core.driving import Driver

Cost = Callable[[StepShape], float]


def max_type(shape: StepShape) -> float:
    """A machine bound by memory at few rows and by compute at many: seconds of a step."""
    memory = 0.008 + 1.2e-7 * shape.decode_context
    compute = 6e-5 * shape.padded_rows + 1.5e-9 * shape.prefill_attention + 2e-5 * shape.logit_rows
    return 0.002 + max(memory, compute) + 3e-5 * shape.attention_calls


def jittered(cost: Cost, share: float) -> Cost:
    """Steps take up to this share longer or less, in a fixed turn that adds up to nothing."""
    factors = cycle(1 + share * factor for factor in (0.0, 1.0, -1.0, 0.5, -0.5))
    return lambda shape: cost(shape) * next(factors)


def disturbed(cost: Cost) -> Cost:
    """Of every fifty steps, four in a row take 1.5 to 4 times as long."""
    factors = cycle([1.0] * 46 + [1.5, 4.0, 2.0, 3.0])
    return lambda shape: cost(shape) * next(factors)


class Oracle(StepTimeModel):
    """Knows the cost."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self._cost = cost
        self.largest_rows_known = 1 << 30

    def predict(self, shape: StepShape) -> float:
        return self._cost(shape)

    def upper(self, shape: StepShape) -> float:
        return self._cost(shape)

    def observe(self, shapes: object, seconds: float, launches: object = ()) -> None:
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

    @property
    def prefill_rate(self) -> float:
        return self.prefill_tokens / self.seconds


def has_prefill(driver: Driver) -> bool:
    """Is any prompt not yet planned to its end?"""
    return any(not r.num_output_tokens and not r.num_pending for r in driver.scheduler.requests.values())


def finish_prefill(driver: Driver) -> None:
    while has_prefill(driver):
        driver.step()


def start_chats(driver: Driver, num_chats: int, **sampling: Any) -> None:
    """Add chats that never end, and let them come to their first tokens."""
    for _ in range(num_chats):
        driver.add(64, max_tokens=100_000, **sampling)
    finish_prefill(driver)


def busy_steps(driver: Driver, steps: int, prompt: int = 8000) -> Iterator[StepSeen]:
    """Steps during which one long prompt is always pending."""
    clock = driver.executor.clock
    for _ in range(steps):
        if not has_prefill(driver):
            driver.add(prompt, max_tokens=1)
        before = clock.now
        driver.step()
        plan = driver.outcomes[-1].plan
        yield StepSeen(clock.now - before, len(plan.decodes), plan.chunks)


def run_load(driver: Driver, *, num_chats: int = 16, prompt: int = 8000, steps: int = 600, skip: int = 60) -> Felt:
    """Keep one long prompt pending and the chats decoding; the first `skip` steps do not count."""
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
    milliseconds: int,
    cost: Cost,
    *,
    depth: int = 1,
    mode: str = "",
    row_buckets: tuple[int, ...] = (),
    waves: AttentionWaves | None = None,
    shed: Callable[[StepPlan], Mapping[int, Shed]] | None = None,
) -> Driver:
    return Driver(
        f"target:{milliseconds}ms{mode}",
        num_blocks=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        caps=ExecutorCaps(
            max_steps_in_flight=depth, row_buckets=row_buckets, attention_waves=waves, sheds_rows=shed is not None
        ),
        cost=cost,
        shed=shed or (lambda plan: {}),
    )
