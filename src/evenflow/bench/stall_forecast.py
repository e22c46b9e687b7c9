"""Forecasts how long the stall benchmark takes: simulates long prompts under each policy at measured step times."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from evenflow.bench.comparison import Turn, resolved_for
from evenflow.bench.stall_load import StallLoad
from evenflow.bench.stall_steps import run_load
from evenflow.core.policies import PolicySpec
from evenflow.core.scheduler import Scheduler
from evenflow.core.step_time import StepTimeModel
from evenflow.engine.engine import Engine
from evenflow.executors.fake import FakeExecutor

logger = logging.getLogger("evenflow")

_INTERVAL_MARGIN = 1.15

Forecast = Mapping[PolicySpec, float]  # seconds that one long prompt takes, by policy


def turn_seconds(turn: Turn[PolicySpec], forecast: Forecast) -> float:
    load: StallLoad = turn.load
    alone, num_prompts = forecast[turn.side], len(load.long_prompts)
    return max((num_prompts - 1) * load.interval + alone, num_prompts * alone)


def forecast_prompts(engine: Engine, load: StallLoad, policies: Sequence[PolicySpec]) -> Forecast:
    """Simulates one long prompt under each policy."""
    one_prompt = replace(load, long_prompts=load.long_prompts[:1])
    with _without_warnings():
        return {policy: run_load(_simulated(engine, policy), one_prompt).total_s for policy in policies}


def interval_to_keep_up(forecast: Forecast) -> float:
    """Seconds between long prompts at which even the slowest policy finishes one before the next arrives."""
    return math.ceil(2 * _INTERVAL_MARGIN * max(forecast.values())) / 2


def prompts_within(seconds: float, forecast: Forecast, repeat: int, most: int) -> int:
    """Long prompts, at least one, for which all policies together take no longer, one prompt at a time."""
    return max(1, min(most, int(seconds / (repeat * sum(forecast.values())))))


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A simulated engine's warnings would read like those of the real one, which repeats them if they are true."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _simulated(engine: Engine, policy: PolicySpec) -> Engine:
    real = engine.scheduler
    # Two copies: the scheduler's goes on learning, the executor's must not.
    step_time, known = (StepTimeModel.from_record(real.step_time.to_record()) for _ in range(2))
    executor = FakeExecutor(
        vocab_size=engine.limits.vocab_size, block_size=real.block_size, caps=real.caps, cost=known.predict
    )
    config = replace(real.config, policy=resolved_for(engine, policy))
    scheduler = Scheduler(config, real.caps, step_time=step_time)
    return Engine(scheduler, executor, engine.limits, clock=executor.clock)
