"""Hooks on SGLang's scheduler, which still does all the work; `steering` limits what a step may hold.

SGLang does not declare its scheduler's interface stable, so everything that evenflow relies on is checked at start.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import NextBatchPlan, Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from evenflow.best_effort import BestEffort
from evenflow.hosts.settings import read_settings
from evenflow.model.cuda.warm_products import warm_up_logits
from evenflow.sglang.launch import SGLANG
from evenflow.sglang.rehearsal import rehearse
from evenflow.sglang.steering import make_steering
from evenflow.sglang.uses import (
    BATCH,
    GROUP,
    HOOKS,
    LOGITS,
    MODEL,
    PARALLEL,
    POLICY,
    POOL_STATS,
    PREFILL_ADDER,
    REQUEST,
    RESULT,
    RUNNER,
    SCHEDULER,
    SETTINGS,
)

logger = logging.getLogger("sglang.evenflow")

_MAX_LOGIT_ROWS = 512  # to warm up: for more there is too little memory beside SGLang's pool
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CLASSES = ((SCHEDULER, Scheduler), (LOGITS, LogitsProcessor), (PREFILL_ADDER, PrefillAdder), (HOOKS, HookRegistry))


def register() -> None:
    """Have SGLang's scheduler keep the target. Raises if this version's interface is another."""
    for uses, owner in _CLASSES:
        SGLANG.check_methods(uses, owner)
    for uses, record in ((BATCH, ScheduleBatch), (RESULT, GenerationBatchResult), (POLICY, schedule_policy)):
        SGLANG.check_attributes(uses, record)
    for name, hook, kind in _HOOKS:
        HookRegistry.register(f"{_SCHEDULER}.{name}", hook, kind)


def _after_init(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    SGLANG.check_attributes(SCHEDULER, scheduler)
    for uses, holder in (
        (SETTINGS, scheduler.server_args),
        (REQUEST, Req("example", "", array("q", [0]), SamplingParams(max_new_tokens=1))),
        (PARALLEL, get_parallel()),
        (RUNNER, scheduler.tp_worker.model_runner),
        (MODEL, scheduler.model_config),
        (GROUP, scheduler.tp_group),
        (POOL_STATS, scheduler.pool_stats_observer.get_pool_stats()),
    ):
        SGLANG.check_attributes(uses, holder)
    scheduler.evenflow = make_steering(scheduler, read_settings(None))
    if scheduler.evenflow is not None and scheduler.tp_worker.model_runner.device != "cpu":
        best_effort = BestEffort(logger)
        best_effort.run("warming up the output layer", partial(warm_up_output_layer, scheduler), None)
        if scheduler.chunked_prefill_size is not None:
            best_effort.run("running steps before the first request", partial(rehearse, scheduler), None)


def warm_up_output_layer(scheduler: Any) -> None:
    """Run it before the first request (see `warm_products`): graphs contain it for decodes only.

    For models whose logits come from an output layer of the usual names.
    """
    runner = scheduler.tp_worker.model_runner
    processor, layer = (getattr(runner.model, name, None) for name in ("logits_processor", "lm_head"))
    if processor is None or layer is None:
        return
    shape = min(scheduler.max_running_requests, _MAX_LOGIT_ROWS), scheduler.model_config.hidden_size
    hidden = torch.zeros(shape, dtype=runner.dtype, device=runner.device)
    logger.info(warm_up_logits(lambda rows: processor._compute_lm_head(rows, layer), hidden))


def _around_next_batch(schedule: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if scheduler.evenflow is None:
        return schedule(scheduler, *args, **kwargs)
    steering = scheduler.evenflow
    steering.follow(steering.begin_step)
    plan = schedule(scheduler, *args, **kwargs)
    steering.follow(partial(steering.scheduled, plan.batch_to_run))
    return plan


def _around_new_prefill(make_batch: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    if scheduler.evenflow is None:
        return make_batch(scheduler, running_batch)
    with scheduler.evenflow.steered_prefill(running_batch) as may_prefill:
        if not may_prefill:
            return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
        return make_batch(scheduler, running_batch)


def _after_run(_: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    if scheduler.evenflow is not None:
        scheduler.evenflow.follow(scheduler.evenflow.launched)


def _around_result(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    if scheduler.evenflow is None:
        return process(scheduler, batch, result)
    with scheduler.evenflow.result_of(batch, result):
        return process(scheduler, batch, result)


def _after_add(_: None, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    if scheduler.evenflow is not None:
        scheduler.evenflow.follow(partial(scheduler.evenflow.add, req))


def _after_idle(_: None, scheduler: Any) -> None:
    if scheduler.evenflow is not None:
        scheduler.evenflow.follow(scheduler.evenflow.idle)


_HOOKS = (
    ("__init__", _after_init, HookType.AFTER),
    ("get_next_batch_to_run", _around_next_batch, HookType.AROUND),
    ("get_new_batch_prefill", _around_new_prefill, HookType.AROUND),
    ("run_batch", _after_run, HookType.AFTER),
    ("process_batch_result", _around_result, HookType.AROUND),
    ("_add_request_to_queue", _after_add, HookType.AFTER),
    ("on_idle", _after_idle, HookType.AFTER),
)
