"""Measures a few steps at start-up, on a small load of its own, so that the first real steps are sized by data."""

from __future__ import annotations

import time

from evenflow.core.policies import PolicySpec
from evenflow.core.request import Request, SamplingParams
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_time import StepTimeModel
from evenflow.executors.base import Executor

_NUM_STREAMS = 4
_STREAM_TOKENS = 24
_CHUNKS = (16, 32, 64, 128, 256, 512)
_DECODES_BETWEEN = 2
MAX_SECONDS = 8.0


def calibrate(
    executor: Executor, *, num_blocks: int, block_size: int, vocab_size: int, max_position: int
) -> StepTimeModel:
    """Run steps of many shapes for about MAX_SECONDS at most.

    Chunks grow; one that would not fit in the time left, judging by the one before, is skipped.
    """
    config = SchedulerConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=False)
    scheduler = Scheduler(config, executor.caps)
    end = time.perf_counter() + MAX_SECONDS
    max_model_len = min(max_position, num_blocks * block_size)
    total = min(2 * sum(_CHUNKS), max_model_len - 2, (num_blocks // 2) * block_size)
    num_added = 0
    for lengths in (_NUM_STREAMS * [_STREAM_TOKENS], [total]):
        for length in lengths:
            tokens = [(7919 * num_added + 31 * position) % vocab_size for position in range(length)]
            sampling = SamplingParams(max_tokens=min(400, max_model_len - length), temperature=0.0, ignore_eos=True)
            scheduler.add(Request(f"warm-up-{num_added}", tokens, sampling, seed=0, max_model_len=max_model_len))
            num_added += 1
        for chunk in _CHUNKS * 2:
            last = _step(scheduler, executor, chunk + _NUM_STREAMS)
            for _ in range(_DECODES_BETWEEN):
                _step(scheduler, executor, 1)
            is_late = time.perf_counter() + 2.5 * last > end
            if is_late or all(request.num_output_tokens for request in scheduler.requests.values()):
                break
    # Through its record, so that a start from a stored calibration continues from the same state.
    return StepTimeModel.from_record(scheduler.step_time.to_record())


def _step(scheduler: Scheduler, executor: Executor, budget: int) -> float:
    """Run one step; returns its seconds, 0 if nothing was left to run."""
    scheduler.set_policy(PolicySpec("fixed", budget))
    plan = scheduler.schedule(time.perf_counter())
    if plan is None:
        return 0.0
    executor.submit(plan)
    result = executor.wait()
    scheduler.commit(result, time.perf_counter())
    return result.seconds
