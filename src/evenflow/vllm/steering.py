"""vLLM's adapter to evenflow's steering: decodes first, and as much prefill as the `target` policy allows.

What evenflow relies on in vLLM is used here, and checked in `plugin`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from evenflow.best_effort import BestEffort
from evenflow.core.plan import ChunkReason, ExecutorCaps
from evenflow.core.policies import WHOLE_PROMPTS, PolicySpec
from evenflow.core.policy import Candidate, Quota
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.prior import Prior, prior_of
from evenflow.hosts.settings import RequestSettings, Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering
from evenflow.step_time_store import step_times_path
from evenflow.vllm.graphs import advice_on_graphs
from evenflow.vllm.versions import (
    long_prefill_threshold,
    max_running,
    settings_against_a_target,
    splits_blocks,
    waiting_requests,
    without_pacing_by_counts,
)

logger = init_logger("vllm.evenflow")  # vLLM shows what its own loggers say

_MAX_PREFILL_SEQUENCES = 16  # considered for one step


class _Prefill(NamedTuple):
    candidate: Candidate
    request: Any
    is_running: bool


class VllmSteering:
    """Translates between one vLLM scheduler and `Steering`."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self._scheduler = scheduler
        self._request_settings = RequestSettings(settings.classes, logger)
        self._budget: int = scheduler.max_num_scheduled_tokens
        is_chunked = scheduler.scheduler_config.enable_chunked_prefill
        best_effort = BestEffort(logger)
        device = best_effort.run("naming the device", current_platform.get_device_name, "")
        prior = best_effort.run("estimating step times", partial(_prior, scheduler.vllm_config, device), Prior())
        # vLLM ends chunks where it can cache the states of a model that has recurrent ones.
        self._block_rows: int = scheduler.cache_config.block_size if scheduler.need_mamba_block_aligned_split else 1
        graph_sizes = tuple(sorted(scheduler.vllm_config.compilation_config.cudagraph_capture_sizes or ()))
        host = Host(
            caps=ExecutorCaps(
                max_prefill_sequences=_MAX_PREFILL_SEQUENCES,
                chunk_alignment=self._block_rows,
                row_buckets=graph_sizes,
                attention_waves=prior.waves,
            ),
            budget=self._budget,
            max_num_seqs=max_running(scheduler),
            step_times_path=best_effort.run(
                "keeping step times", partial(_step_times_path, scheduler.vllm_config, device), None
            ),
            logger=logger,
            prior=prior.costs,
            num_stages=scheduler.parallel_config.pipeline_parallel_size,
            own_policy=PolicySpec("fixed", self._budget) if is_chunked else WHOLE_PROMPTS,
        )
        self.core = Steering(host, settings)
        self._next = InFlightStep()  # the one being scheduled
        self._held: list[tuple[Any, int]] = []  # requests left out of it, and the step from which vLLM would run them
        self._awaited: set[str] = set()  # waiting requests that these make way for
        self._places: dict[str, int] = {}  # of prompts, in order of service
        self._splits_blocks = splits_blocks(vllm.__version__)
        self._is_blocked = False  # vLLM did not start any of them: the next step is for those that run
        self._can_chunk = bool(is_chunked and scheduler.num_sampled_tokens_per_step)
        obstacle = None if self._can_chunk else "vLLM does not chunk this model's prompts"
        self.core.log_start(f"vLLM {vllm.__version__}", obstacle)
        advice = best_effort.run("advice on graphs", partial(advice_on_graphs, graph_sizes, self._budget), None)
        if self._steers:
            for line in (*settings_against_a_target(scheduler.scheduler_config), *filter(None, [advice])):
                logger.info(line)

    # ---- before a step ----

    def add(self, request: Any) -> None:
        """A request arrived."""
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        self.core.add(
            HostRequest(
                id=request.request_id,
                arrival_time=request.arrival_time,
                num_prompt_tokens=request.num_prompt_tokens,
                num_tokens=request.num_tokens,
                num_cached_tokens=self._num_cached(request),
                max_tokens=request.max_tokens,
                **self._request_settings.read(extra_args, request.priority),
            )
        )

    @property
    def _steers(self) -> bool:
        """False: vLLM's own order and budget are left as they are."""
        return self._can_chunk and self.core.is_active

    def _line_up(self, now: float, prefilling: Sequence[Any]) -> None:
        """Have waiting requests in order of service, as in evenflow's own queue."""
        request_ids = [request.request_id for request in (*prefilling, *waiting_requests(self._scheduler))]
        self._places = self.core.line_up(now, request_ids, _MAX_PREFILL_SEQUENCES)
        waiting = self._scheduler.waiting
        if self._is_first_come_first_served:
            in_order = sorted(waiting, key=self._place)
            if in_order != list(waiting):
                waiting.clear()
                waiting.extend(in_order)

    def _place(self, request: Any) -> int:
        return self._places[request.request_id]

    @contextmanager
    def next_step(self) -> Iterator[bool]:
        """Within this, vLLM schedules a step that keeps the target. False: it has its own order and budget."""
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        before = scheduler.policy, config.long_prefill_token_threshold
        self._next = InFlightStep(self.core.clock())
        try:
            is_steered = self.core.best_effort.run("the latency target", self._begin_step, False)
            with without_pacing_by_counts(scheduler) if is_steered else nullcontext():
                yield is_steered
        finally:
            scheduler.max_num_scheduled_tokens = self._budget
            scheduler.policy, config.long_prefill_token_threshold = before
            for request, eligible_step in self._held:
                request.next_decode_eligible_step = eligible_step
            self._held = []

    def _begin_step(self) -> bool:
        self.core.begin_step()
        now = self.core.clock()
        decodes = [request for request in self._scheduler.running if not request.is_prefill_chunk]
        self._next = InFlightStep(now, {request.request_id for request in decodes})
        if is_steered := self._steers:
            self._steer(now, decodes)
        return is_steered

    def _steer(self, now: float, decodes: Sequence[Any]) -> None:
        scheduler = self._scheduler
        prefilling = [request for request in scheduler.running if request.is_prefill_chunk]
        self._line_up(now, prefilling)
        prefilling.sort(key=self._place)
        scheduler.running[:] = [*decodes, *prefilling]
        prefills = self._prefills(prefilling)
        num_decode_rows, quotas = self.core.plan(
            now,
            [self._decode(request) for request in decodes],
            [prefill.candidate for prefill in prefills],
            free_tokens=self._num_free_blocks * scheduler.block_size,
            long_prefill_token_threshold=long_prefill_threshold(scheduler, sum(scheduler.get_request_counts())),
        )
        num_tokens = self._make_way(prefilling, prefills, quotas)
        if not any(quota.tokens == prefills[quota.candidate].candidate.length for quota in quotas):
            num_tokens = self._in_blocks(num_tokens)
        if prefills:
            scheduler.max_num_scheduled_tokens = min(self._budget, num_decode_rows + num_tokens)
        if self._may_preempt(num_tokens):
            # vLLM would preempt the last of its list, which now is a prefill, however old, that would never finish. By
            # this policy it preempts the least urgent request, and of several the one that arrived last.
            if self._is_first_come_first_served:
                for request in scheduler.running:
                    request.priority = self.core.level(request.request_id)
            scheduler.policy = SchedulingPolicy.PRIORITY
        self._next.reasons = {prefills[quota.candidate].candidate.request_id: quota.reason for quota in quotas}

    def _decode(self, request: Any) -> Decode:
        """The rows that vLLM will give to a running request beyond its prompt: none if its next token is not due."""
        scheduler = self._scheduler
        computed, pending = request.num_computed_tokens, request.num_output_placeholders
        rows: int = min(request.num_tokens_with_spec + pending, scheduler.max_model_len - 1) - computed
        if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
            rows = 0
        if scheduler.current_step + 1 < request.next_decode_eligible_step:
            rows = 0
        return Decode(request.request_id, max(0, rows), computed + rows)

    def _prefills(self, prefilling: Sequence[Any]) -> list[_Prefill]:
        """Prompts to continue and to start, in serving order, up to what a step takes."""
        found = [_Prefill(_candidate(request, request.num_computed_tokens), request, True) for request in prefilling]
        limit = min(_MAX_PREFILL_SEQUENCES, max_running(self._scheduler) - len(self._scheduler.running))
        # Without a prompt that runs, a step for those that run would leave vLLM its whole budget for the others.
        only_running = self._is_blocked and bool(prefilling)
        for request in () if only_running else islice(waiting_requests(self._scheduler), max(0, limit)):
            start = request.num_computed_tokens or self._num_cached(request)
            found.append(_Prefill(_candidate(request, start), request, False))
        if self._is_first_come_first_served:
            found.sort(key=lambda prefill: (not self._fits(prefill), self._place(prefill.request)))
        return found[:_MAX_PREFILL_SEQUENCES]

    def _make_way(self, prefilling: Sequence[Any], prefills: Sequence[_Prefill], quotas: Sequence[Quota]) -> int:
        """vLLM serves running requests before waiting ones: hold back those that would take more than their quota.

        Returns the tokens of the others.
        """
        allowed = {prefills[quota.candidate].request.request_id: quota.tokens for quota in quotas}
        running = {request.request_id for request in prefilling}
        if allowed.keys() <= running:
            return sum(allowed.values())
        config, least = self._scheduler.scheduler_config, 1 + self._scheduler.num_spec_tokens
        most = max(least, *allowed.values())
        config.long_prefill_token_threshold = min(config.long_prefill_token_threshold or most, most)
        for request in prefilling:
            wanted = min(config.long_prefill_token_threshold, request.num_tokens - request.num_computed_tokens)
            if allowed.get(request.request_id, 0) < wanted:
                allowed.pop(request.request_id, None)
                self._hold(request)
        if self._held:
            self._awaited = {request_id for request_id in allowed if request_id not in running}
        return sum(allowed.values())

    def _hold(self, request: Any) -> None:
        """Have vLLM leave a running request out of the next step."""
        self._held.append((request, request.next_decode_eligible_step))
        request.next_decode_eligible_step = self._scheduler.current_step + 2

    def _num_cached(self, request: Any) -> int:
        scheduler = self._scheduler
        if not scheduler.cache_config.enable_prefix_caching or request.skip_reading_prefix_cache:
            return 0
        find = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        num_cached: int = find(request.block_hashes, request.num_tokens - 1)[1]
        return num_cached

    def _fits(self, prefill: _Prefill) -> bool:
        """Is there room for the whole prompt? One that vLLM cannot start must not go first."""
        num_tokens = self._num_free_blocks * self._scheduler.block_size
        return prefill.is_running or prefill.candidate.length <= num_tokens

    def _in_blocks(self, num_tokens: int) -> int:
        """Tokens with which a prompt that goes on makes progress: with recurrent states it does block by block."""
        if not 0 < num_tokens < self._block_rows:
            return num_tokens
        config = self._scheduler.scheduler_config
        if not self._splits_blocks:
            return self._block_rows
        # A smaller limit on chunks has vLLM compute part of a block; the next chunk ends where the block does.
        least = max(num_tokens, 1 + self._scheduler.num_spec_tokens)
        config.long_prefill_token_threshold = min(config.long_prefill_token_threshold or least, least)
        return num_tokens

    def _may_preempt(self, num_prefill_tokens: int) -> bool:
        """Could the running requests need more blocks in this step than are free?"""
        scheduler = self._scheduler
        num_tokens = num_prefill_tokens + len(scheduler.running) * (
            1 + scheduler.num_spec_tokens + scheduler.num_lookahead_tokens
        )
        num_blocks = num_tokens // scheduler.cache_config.block_size + 2 * len(scheduler.running)
        return bool(self._num_free_blocks < num_blocks * len(scheduler.kv_cache_config.kv_cache_groups))

    @property
    def _num_free_blocks(self) -> int:
        count: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    @property
    def _is_first_come_first_served(self) -> bool:
        return bool(self._scheduler.policy == SchedulingPolicy.FCFS)

    # ---- after a step ----

    def scheduled(self, output: Any) -> None:
        """vLLM scheduled this."""
        step, requests = self._next, self._scheduler.requests
        self._is_blocked = bool(self._awaited) and self._awaited.isdisjoint(output.num_scheduled_tokens)
        self._awaited = set()
        step.key = output
        decodes, num_ended = list[Decode](), 0
        for request_id, length in output.num_scheduled_tokens.items():
            request = requests[request_id]
            end = request.num_computed_tokens  # with this step's tokens
            if request_id in step.decode_ids:
                decodes.append(Decode(request_id, length, end))
            else:
                step.chunks.append((request_id, end - length, length))
                if not request.is_prefill_chunk:
                    num_ended += 1
                    step.reasons.setdefault(request_id, ChunkReason.END_OF_PROMPT)
                elif length == self._scheduler.scheduler_config.long_prefill_token_threshold:
                    step.reasons.setdefault(request_id, ChunkReason.LONG_PREFILL)
        self.core.scheduled(step, decodes, num_ended)

    def emitted(self, step: InFlightStep, outputs: Mapping[int, Any]) -> None:
        """vLLM has handed out the step's tokens."""
        rows = chain.from_iterable(outputs_of_client.outputs for outputs_of_client in outputs.values())
        tokens = {output.request_id: output.new_token_ids for output in rows if output.new_token_ids}
        num_running, num_waiting = self._scheduler.get_request_counts()
        load = HostLoad(num_running, num_waiting, self._scheduler.kv_cache_manager.usage)
        self.core.emitted(step, tokens, self._scheduler.requests, load)


def _candidate(request: Any, start: int) -> Candidate:
    return Candidate(request.request_id, start, max(1, request.num_tokens - start), request.num_prompt_tokens)


def _prior(config: Any, device: str) -> Prior:
    model, num_ranks = config.model_config, config.parallel_config.tensor_parallel_size
    return prior_of(
        model.hf_text_config,
        device,
        num_ranks,
        model.dtype.itemsize,
        quantization=model.quantization,
        quantization_config=getattr(model.hf_config, "quantization_config", None),
        cache_itemsize=1.0 if "fp8" in config.cache_config.cache_dtype else 2.0,
    )


def _step_times_path(config: Any, device: str) -> Path:
    """Where step times of this model, split over devices in this way, are stored. vLLM's own hashes cover the rest."""
    parts = (config.model_config.compute_hash(), config.parallel_config.compute_hash(), config.cache_config.cache_dtype)
    return step_times_path("vllm", vllm.__version__, *parts, device)
