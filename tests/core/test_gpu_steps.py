"""Steps on a device like a large GPU: attention computed in tiles, a clock that falls under load.

The figures are those of an H200 with an 8B model under vLLM, as measured by `benchmarks/gpu/vllm_loads.py`.
"""

from __future__ import annotations

import pytest

from evenflow.core.plan import ExecutorCaps, StepShape
from tests.core.driving import Driver
from tests.core.target_load import StepSeen, has_prefill, jittered, start_chats

GRAPHS = (*range(8, 257, 8), *range(272, 513, 16))
CAPS = ExecutorCaps(row_buckets=GRAPHS)
TILE = 128  # rows of a chunk that attention computes together
# Milliseconds of a chunk's attention by its tiles, for each 1,000 positions before it.
ATTENTION = (0.0, 0.06, 0.12, 0.38, 0.46, 0.74, 0.82, 0.88, 0.95, 1.28, 1.39, 1.56, 1.69, 1.82, 2.0, 2.1, 2.2)


class Gpu:
    """Seconds of steps with one chunk at most. After rest the clock is high until the device is hot."""

    def __init__(self) -> None:
        self._heat = 0.0

    def __call__(self, shape: StepShape) -> float:
        milliseconds = max(8.1, 0.0285 * shape.padded_rows) + self._attention(shape)
        milliseconds *= 0.7 + 0.3 * self._heat
        if shape.is_launched:
            milliseconds = max(24.0, milliseconds)
        warming = milliseconds / 90 if shape.prefill_rows else -milliseconds / 150
        self._heat = min(1.0, max(0.0, self._heat + warming))
        return milliseconds / 1000

    def _attention(self, shape: StepShape) -> float:
        if not shape.prefill_rows:
            return 0.0
        tiles = -(-shape.prefill_rows // TILE)
        positions = shape.prefill_attention / shape.prefill_rows  # that a row sees
        per_thousand = ATTENTION[tiles] if tiles < len(ATTENTION) else tiles * ATTENTION[-1] / (len(ATTENTION) - 1)
        return per_thousand * positions / 1000


def gpu_driver(milliseconds: int, jitter: float = 0.0) -> Driver:
    return Driver(
        f"target:{milliseconds}ms",
        num_blocks=20_000,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        caps=CAPS,
        cost=jittered(Gpu(), jitter),
    )


def prefills_after_rest(driver: Driver, num_prompts: int) -> list[StepSeen]:
    """Steps with prefill of prompts that come one by one, each after half a second of decoding alone."""
    seen = []
    for _ in range(num_prompts):
        for _ in range(60):
            driver.step()
        driver.add(32_000, max_tokens=1)
        before = driver.executor.clock.now
        while has_prefill(driver):
            driver.step()
            plan, now = driver.outcomes[-1].plan, driver.executor.clock.now
            seen.append(StepSeen(now - before, len(plan.decodes), plan.chunks))
            before = now
    return seen


@pytest.mark.parametrize("milliseconds", [25, 50])
@pytest.mark.parametrize("jitter", [pytest.param(0.0, marks=pytest.mark.slow), 0.05])
def test_gaps_stay_in_time_though_the_device_comes_from_rest(milliseconds: int, jitter: float) -> None:
    driver = gpu_driver(milliseconds, jitter)
    start_chats(driver, 32)
    prefills_after_rest(driver, 2)
    gaps = [step.gap for step in prefills_after_rest(driver, 6)]
    late = [gap for gap in gaps if gap > 1.1 * milliseconds / 1000]
    assert len(late) <= 0.04 * len(gaps)


def test_attention_counts_the_positions_that_each_row_sees() -> None:
    shape = ExecutorCaps().step_shape(chunks=[(11, 11)])
    assert shape.prefill_attention == sum(range(12, 23))
