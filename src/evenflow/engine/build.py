"""From an EngineConfig to a running engine: loads the model, places it, chooses the policy, logs the choices.

The only place where settings, model, executor and scheduler meet. Imports torch when called, not before.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from evenflow.config import EngineConfig
from evenflow.core.default_target import default_target, target_reason
from evenflow.core.policies import DEFAULT_BUDGET, PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_time import StepTimeModel
from evenflow.counts import counted
from evenflow.duration import MAX_TARGET_S, format_duration
from evenflow.engine.calibration import LARGEST_CHUNK, MAX_SECONDS, Calibration
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.placement import Placement, on_this_machine, place
from evenflow.engine.recorder import Recorder
from evenflow.engine.watchdog import Pulse
from evenflow.errors import EvenflowError, MissingDependency, OutOfMemory
from evenflow.executors.base import Executor
from evenflow.host import CpuTimes, num_cpus
from evenflow.log_output import STAGE, ensure_logging
from evenflow.model.hub.cached_models import find_model
from evenflow.step_time_store import StepTimeKeeper, load_step_times, min_target, save_step_times, step_times_path

if TYPE_CHECKING:
    from evenflow.model.config import ModelConfig
    from evenflow.model.loader import LoadedModel
    from evenflow.model.text.grammar import Grammars
    from evenflow.model.text.tokenizer import Tokenizer

logger = logging.getLogger("evenflow")

_DISTURBING_SHARE = 0.15  # of the cores: a shell and a browser at rest take less
_MIN_WATCHED_S = 0.5  # the system counts in hundredths of a second


Place = Callable[[EngineConfig, "LoadedModel", "Grammars"], Placement]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    intake: Intake
    tokenizer: Tokenizer
    config: EngineConfig  # with all open choices made
    target_reason: str  # of a target that no setting decided: "as fast as people read"; else ""
    busy_notice: str  # what that target allows for, if this machine is busy with other programs; else ""


def build_engine(config: EngineConfig, record: str | Path | None = None, *, place: Place = place) -> BuiltEngine:
    """Load the model and put an engine around it."""
    ensure_logging()
    before = CpuTimes.now()
    model_path = find_model(config.model)  # fails before the slow imports
    try:
        from evenflow.engine.offload import build_tier
        from evenflow.executors.kv_tier import TieredExecutor
        from evenflow.model.loader import load_model
        from evenflow.model.text.grammar import Grammars
    except ImportError as error:
        raise MissingDependency(
            f"the embedded engine needs {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    config = on_this_machine(config)
    model = load_model(config.model, is_dummy=config.load_format == "dummy")
    grammars = Grammars(model.tokenizer, model.config.vocab_size)
    with _memory_errors():
        placement = place(config, model, grammars)
    executor, policy = placement.executor, placement.policy
    calibration = _calibration(config, model.config, placement)
    if placement.largest_trial_chunk is not None:
        calibration.warm_up()
    step_time = keeper = None
    reason = notice = ""
    if config.chosen_policy is None or policy.target is not None:
        path = step_times_path(model.config, config.weights, config.max_steps_in_flight, placement.machine)
        step_time, is_new = _known_step_times(calibration, path)
        keeper = StepTimeKeeper(step_time, path)
        if config.chosen_policy is None:
            now = step_time if is_new else calibration.check(step_time)
            if notice := _busy_notice(before):
                logger.info(notice)  # first: it explains the target
            policy, reason = _default_policy(config, now, executor, path, is_disturbed=bool(notice))
    scheduler_config = _scheduler_config(config, policy, placement.num_blocks)
    if placement.blocks is not None and (config.kv_offload_memory or config.cache_dir is not None):
        tier, tier_config = build_tier(config, model.config, model_path, placement.blocks)
        executor, scheduler_config = TieredExecutor(executor, tier), replace(scheduler_config, tier=tier_config)
    scheduler = Scheduler(scheduler_config, executor.caps, step_time=step_time)
    limits = Limits(placement.max_model_len, model.config.vocab_size)
    recorder = Recorder(record, scheduler) if record is not None else None
    pulse = Pulse(config.step_timeout)
    engine = Engine(scheduler, executor, limits, recorder, has_grammars=True, keeper=keeper, pulse=pulse)
    intake = Intake(
        limits,
        config.block_size,
        model.tokenizer,
        engine.clock,
        seed=config.seed,
        check_grammar=grammars.check,
        classes=config.classes,
    )
    _log_policy(policy, reason)
    # Loaded objects are permanent: scanning them in a full collection would add 0.1 s to a gap.
    gc.collect()
    gc.freeze()
    return BuiltEngine(engine, intake, model.tokenizer, config, reason, notice)


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turn the allocators' errors in the block into one that says what to lower."""
    from evenflow.executors.sequences import is_out_of_memory

    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, EvenflowError) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            "The model and its KV cache do not fit in memory: lower kv_cache_memory or gpu_memory_utilization, or use "
            "a smaller model."
        ) from error


def _scheduler_config(config: EngineConfig, policy: PolicySpec, num_blocks: int) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        policy=policy,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        classes=config.classes,
        tenant_weights=config.tenant_weights,
    )


def _calibration(config: EngineConfig, model: ModelConfig, placement: Placement) -> Calibration:
    on_gpu = placement.largest_trial_chunk is not None
    return Calibration(
        executor=placement.executor,
        num_blocks=placement.num_blocks,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        max_position=placement.max_model_len if on_gpu else model.max_position,
        prior=placement.prior,
        largest_chunk=placement.largest_trial_chunk or LARGEST_CHUNK,
    )


def _known_step_times(calibration: Calibration, path: Path) -> tuple[StepTimeModel, bool]:
    """Step costs on this machine, from an earlier start or measured now, and whether they were measured now."""
    known = load_step_times(path, calibration.prior)
    if known is not None:
        return known, False
    text = "Measuring step times, once for this model on this machine (at most %.0f s)."
    logger.info(text, MAX_SECONDS, extra=STAGE)
    measured = calibration.measure()
    save_step_times(measured, path)
    return measured, True


def _default_policy(
    config: EngineConfig, step_time: StepTimeModel, executor: Executor, path: Path, *, is_disturbed: bool
) -> tuple[PolicySpec, str]:
    """A target that this machine keeps, and why."""
    target_s = default_target(step_time, executor.caps, config.max_num_seqs, is_disturbed=is_disturbed)
    if not is_disturbed:  # an earlier start's target would not hold now, and this one says nothing of later starts
        target_s = min_target(path, target_s)
    policy = PolicySpec.for_target(format_duration(min(target_s, MAX_TARGET_S)))
    return policy, target_reason(target_s, is_disturbed)


def _busy_notice(before: CpuTimes | None) -> str:
    """What to say if other programs took this machine's cores since then; "" if they did not."""
    after = CpuTimes.now()
    if before is None or after is None or after.at - before.at < _MIN_WATCHED_S:
        return ""
    taken, num_cores = after.taken_since(before), num_cpus()
    if taken <= _DISTURBING_SHARE * num_cores:
        return ""
    return (
        f"This machine is busy: other programs take {taken:.1f} of its {counted(num_cores, 'core')}. Steps are slower "
        "and less even than they would be alone; the target allows for that."
    )


def _log_policy(policy: PolicySpec, reason: str) -> None:
    if not policy.cuts_prompts:
        logger.info("Chunked prefill is disabled: a prompt is prefilled in one step of up to %d tokens.", policy.budget)
        return
    if policy.target is None:
        logger.info("Chunked prefill is enabled with max_num_batched_tokens=%d.", policy.budget)
        return
    logger.info("Chunked prefill is enabled with tbt_target=%s.", str(policy).removeprefix("target:"))
    if reason:
        logger.info(
            "Why: no setting decides it, and this is %s. Another target: --tbt-target 200ms or tbt_target=0.2. "
            "Chunks of a fixed size instead: --max-num-batched-tokens %d.",
            *(reason, DEFAULT_BUDGET),
        )
