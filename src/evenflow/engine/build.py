"""From an EngineConfig to a running engine: load the model, size the KV cache, choose the policy, log it.

The only place where settings, model, executor and scheduler meet. Imports torch when called, not before.
"""

from __future__ import annotations

import gc
import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from evenflow.config import GIB, EngineConfig
from evenflow.core.default_target import default_target, target_reason
from evenflow.core.policies import DEFAULT_BUDGET, PolicySpec
from evenflow.core.scheduler import Scheduler, SchedulerConfig
from evenflow.core.step_time import StepTimeModel
from evenflow.engine.calibration import MAX_SECONDS, Calibration
from evenflow.engine.engine import Engine
from evenflow.engine.intake import Intake, Limits
from evenflow.engine.recorder import Recorder
from evenflow.errors import InvalidConfig, MissingDependency
from evenflow.executors.base import Executor
from evenflow.host import available_memory, num_cpus
from evenflow.log_output import STAGE, ensure_logging
from evenflow.model.locate import find_model
from evenflow.step_time_store import StepTimeKeeper, least_target, load_step_times, save_step_times, step_times_path

if TYPE_CHECKING:
    from evenflow.model.config import ModelConfig
    from evenflow.model.tokenizer import Tokenizer

logger = logging.getLogger("evenflow")

_MOST_DEFAULT_KV_BYTES = 4 * GIB


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    engine: Engine
    intake: Intake
    tokenizer: Tokenizer


def build_engine(config: EngineConfig, record: str | Path | None = None) -> BuiltEngine:
    """Load the model and put an engine around it."""
    ensure_logging()
    find_model(config.model)  # an error here comes before the slow imports
    try:
        from evenflow.executors.torch_executor import TorchExecutor
        from evenflow.model.grammar import Grammars
        from evenflow.model.kv_cache import kv_bytes_per_token
        from evenflow.model.loader import load_model
    except ImportError as error:
        raise MissingDependency(
            f"the embedded engine needs {error.name}, which is not installed: pip install 'evenflow[engine]'"
        ) from error
    model = load_model(config.model)
    token_bytes = kv_bytes_per_token(model.config)
    num_blocks = _num_blocks(config, token_bytes)
    max_model_len = _max_model_len(config, model.config, num_blocks)
    policy = config.resolve_policy(max_model_len)
    grammars = Grammars(model.tokenizer, model.config.vocab_size)
    executor = TorchExecutor(
        model.config,
        model.weights,
        num_blocks=num_blocks,
        block_size=config.block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        weights=config.weights,
        threads=config.threads,
        max_steps_in_flight=config.max_steps_in_flight,
        grammars=grammars,
    )
    step_time = keeper = None
    if config.chosen_policy is None or policy.target is not None:
        path = _step_times_path(config, model.config)
        calibration = _calibration(config, model.config, executor, num_blocks)
        step_time, is_new = _known_step_times(calibration, path)
        keeper = StepTimeKeeper(step_time, path)
        if config.chosen_policy is None:
            now = step_time if is_new else calibration.check(step_time)
            target_s = default_target(now, executor.caps, config.max_num_seqs)
            policy = PolicySpec.for_target(least_target(path, target_s))
    scheduler = Scheduler(_scheduler_config(config, policy, num_blocks), executor.caps, step_time=step_time)
    limits = Limits(max_model_len, model.config.vocab_size)
    recorder = Recorder(record, scheduler) if record is not None else None
    engine = Engine(scheduler, executor, limits, recorder, has_grammars=True, keeper=keeper)
    intake = Intake(
        limits,
        config.block_size,
        model.tokenizer,
        engine.clock,
        seed=config.seed,
        check_grammar=grammars.check,
        classes=config.classes,
    )
    _log_policy(config, policy)
    # Loaded objects stay for good; without this, a full collection would add a tenth of a second to some gap.
    gc.collect()
    gc.freeze()
    return BuiltEngine(engine, intake, model.tokenizer)


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


def _num_blocks(config: EngineConfig, token_bytes: int) -> int:
    """Blocks that fit the KV memory. A cached prefix is stored besides the running copy, so caching halves it."""
    memory = config.kv_cache_memory
    if memory is None:
        memory = min(int(available_memory() * config.gpu_memory_utilization), _MOST_DEFAULT_KV_BYTES)
    copies = 2 if config.enable_prefix_caching else 1
    num_blocks = memory // (copies * token_bytes * config.block_size)
    if num_blocks < 1:
        raise InvalidConfig(
            f"Got {memory} bytes for the KV cache but one block of {config.block_size} tokens takes "
            f"{copies * token_bytes * config.block_size}: raise kv_cache_memory or gpu_memory_utilization."
        )
    return num_blocks


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    asked = config.max_model_len
    if asked is not None and asked > model.max_position:
        raise InvalidConfig(f"Got max_model_len={asked} but the model's context is {model.max_position}.")
    wanted, capacity = asked or model.max_position, num_blocks * config.block_size
    if wanted > capacity:
        if asked is not None:
            raise InvalidConfig(
                f"Got max_model_len={asked} but the KV cache holds {capacity} tokens: raise kv_cache_memory."
            )
        logger.warning("The KV cache holds %d tokens: contexts are limited to that, not %d.", capacity, wanted)
    return min(wanted, capacity)


def _calibration(config: EngineConfig, model: ModelConfig, executor: Executor, num_blocks: int) -> Calibration:
    return Calibration(
        executor=executor,
        num_blocks=num_blocks,
        block_size=config.block_size,
        vocab_size=model.vocab_size,
        max_position=model.max_position,
    )


def _step_times_path(config: EngineConfig, model: ModelConfig) -> Path:
    from evenflow.native.build import library

    machine = platform.processor(), num_cpus(), library() is not None
    return step_times_path(model, config.weights, config.threads, config.max_steps_in_flight, *machine)


def _known_step_times(calibration: Calibration, path: Path) -> tuple[StepTimeModel, bool]:
    """What a step costs on this machine, from an earlier start or measured now; and whether it was measured now."""
    known = load_step_times(path)
    if known is not None:
        return known, False
    text = "Measuring step times, once for this model on this machine (at most %.0f s)."
    logger.info(text, MAX_SECONDS, extra=STAGE)
    measured = calibration.measure()
    save_step_times(measured, path)
    return measured, True


def _log_policy(config: EngineConfig, policy: PolicySpec) -> None:
    if policy.name == "unchunked":
        logger.info("Chunked prefill is disabled: a prompt is prefilled in one step of up to %d tokens.", policy.budget)
        return
    if policy.target is None:
        logger.info("Chunked prefill is enabled with max_num_batched_tokens=%d.", policy.budget)
        return
    logger.info("Chunked prefill is enabled with tbt_target=%s.", str(policy).removeprefix("target:"))
    if config.chosen_policy is None:
        logger.info(
            "Why: no setting decides it, and this is %s. Another target: --tbt-target 200ms or tbt_target=0.2. "
            "Chunks of a fixed size instead: --max-num-batched-tokens %d.",
            *(target_reason(policy.target), DEFAULT_BUDGET),
        )
