"""How one of vLLM's schedulers is steered: decodes first, and as much prefill as evenflow's `target` policy allows.

After each step the policy's model learns how long it took. What evenflow relies on in vLLM is used here and in
`flight`, and checked in `plugin`. Must not know: devices, HTTP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import vllm
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.platform_utils import cuda_get_device_properties
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from evenflow.core.pacing import NO_DEADLINE, Pacing
from evenflow.core.plan import ExecutorCaps, StepShape
from evenflow.core.policies import make_policy
from evenflow.core.policy import Candidate, Quota, StepView
from evenflow.core.step_time import StepTimeModel
from evenflow.core.target_policy import Target
from evenflow.step_time_store import load_step_times, save_step_times, step_times_path
from evenflow.vllm.flight import Flight, Step
from evenflow.vllm.reports import ChunkDone, LateToken, Reporter, StepDone
from evenflow.vllm.settings import Settings, own_target
from evenflow.vllm.target_file import TargetFile

logger = init_logger("vllm.evenflow")

_MAX_PREFILL_SEQUENCES = 16  # considered for one step
_CUDA_ATTENTION_TILE = 128  # rows of a chunk, for one head, that one processor of a GPU computes together
_STEPS_BETWEEN_SAVES = 8192  # of step times: a save takes a millisecond


@dataclass(slots=True)
class _Stream:
    """What evenflow knows of a request besides vLLM."""

    own_target: float | None
    rank: float  # prompts are served in this order
    deadline: float = NO_DEADLINE
    last_token_time: float = 0.0
    num_tokens: int = 0


class _Prefill(NamedTuple):
    candidate: Candidate
    request: Any
    is_running: bool


class Steering:
    """One vLLM scheduler's budget, step by step. It keeps what vLLM does not: deadlines, ranks and step times."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self._scheduler = scheduler
        self._budget: int = scheduler.max_num_scheduled_tokens  # vLLM's own, which stays the limit
        # With a pipeline, a stream's next token takes as many steps as there are stages.
        self._num_stages: int = scheduler.parallel_config.pipeline_parallel_size
        self._pacing, self._policy = self._paced_by(settings.policy)
        self._target_file = TargetFile(settings.target_file) if settings.target_file else None
        self._caps = ExecutorCaps(
            max_prefill_sequences=_MAX_PREFILL_SEQUENCES,
            row_buckets=tuple(sorted(scheduler.vllm_config.compilation_config.cudagraph_capture_sizes or ())),
            **_attention_granules(scheduler.vllm_config),
        )
        self._step_times_path = _step_times_path(scheduler.vllm_config)
        self.step_time = load_step_times(self._step_times_path) or StepTimeModel()
        self._reporter = Reporter(settings.policy, self._pacing.target, self._budget, settings.step_socket)
        self._streams: dict[str, _Stream] = {}
        self._next = Step(0.0)  # the one being scheduled
        self._flight = Flight(self._caps, self.step_time)
        self._num_steps = 0
        self._has_warned = False
        self._can_steer = scheduler.scheduler_config.enable_chunked_prefill and scheduler.num_sampled_tokens_per_step
        if self._can_steer:
            logger.info("evenflow: latency target %g ms on vLLM %s", 1000 * self._pacing.target, vllm.__version__)
        else:
            logger.warning("evenflow: vLLM does not cut this model's prompts into chunks; no latency target is kept")

    def _paced_by(self, policy: str) -> tuple[Pacing, Target]:
        pacing = make_policy(policy, self._budget).pacing
        assert pacing is not None
        return pacing, Target(self._budget, replace(pacing, target=pacing.target / self._num_stages))

    def _take_new_target(self) -> None:
        policy = self._target_file.changed() if self._target_file is not None else None
        if policy is not None:
            self._pacing, self._policy = self._paced_by(policy)
            self._reporter.retarget(policy, self._pacing.target)
            self._has_warned = False
            logger.info("evenflow: latency target %g ms from now on", 1000 * self._pacing.target)

    # ---- before a step ----

    def add(self, request: Any) -> None:
        """A request arrived. The short may pass the long, as in evenflow's own queue: see `evenflow.core.queue`."""
        num_cached = self._num_cached(request)
        prefill_seconds = self.step_time.predict(self._caps.prefill_shape(num_cached, request.num_tokens - num_cached))
        extra_args = request.sampling_params.extra_args if request.sampling_params else None
        rank = request.arrival_time + self._policy.patience * prefill_seconds
        self._streams[request.request_id] = _Stream(own_target(extra_args), rank)
        arrived_at = self.clock() - max(0.0, time.time() - request.arrival_time)
        self._reporter.arrived(request.request_id, arrived_at, request.num_prompt_tokens, request.max_tokens)
        waiting = self._scheduler.waiting
        if self._is_first_come_first_served and len(waiting) > 1 and self._rank(waiting[-1]) < self._rank(waiting[-2]):
            ordered = sorted(waiting, key=self._rank)
            waiting.clear()
            waiting.extend(ordered)

    @contextmanager
    def next_step(self) -> Iterator[None]:
        """Within this, vLLM schedules a step that keeps the target."""
        scheduler, config = self._scheduler, self._scheduler.scheduler_config
        before = scheduler.policy, config.long_prefill_token_threshold
        self._take_new_target()
        if self._can_steer:
            self._steer(self.clock())
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = self._budget
            scheduler.policy, config.long_prefill_token_threshold = before

    def _steer(self, now: float) -> None:
        scheduler = self._scheduler
        decodes = [request for request in scheduler.running if not request.is_prefill_chunk]
        prefilling = sorted((request for request in scheduler.running if request.is_prefill_chunk), key=self._rank)
        scheduler.running[:] = decodes + prefilling
        prefills = self._prefills(prefilling)
        view = self._view(now, decodes, [prefill.candidate for prefill in prefills])
        quotas = self._policy.plan(view).chunks
        self._warn_if_infeasible()
        num_tokens = sum(quota.tokens for quota in quotas)
        if prefills:
            scheduler.max_num_scheduled_tokens = min(self._budget, view.num_decodes + self._aligned(num_tokens))
            self._make_way(prefills, quotas, num_tokens)
        if self._may_preempt(num_tokens):
            # vLLM would preempt whoever stands last in its list, which now is a prefill, however old, that would never
            # get through. By this policy it preempts who came last, wherever that one stands.
            scheduler.policy = SchedulingPolicy.PRIORITY
        reasons = {prefills[quota.candidate].candidate.request_id: quota.reason.value for quota in quotas}
        self._next = Step(now, {request.request_id for request in decodes}, reasons)

    def _view(self, now: float, decodes: Sequence[Any], candidates: Sequence[Candidate]) -> StepView:
        num_rows = context = 0
        deadline, target = math.inf, math.inf
        for request in decodes:
            rows = self._num_decode_rows(request)
            if rows:
                num_rows += rows
                context += rows * (request.num_computed_tokens + rows)
                stream = self._streams[request.request_id]
                deadline = min(deadline, stream.deadline) if stream.deadline > NO_DEADLINE else deadline
                target = min(target, self._pacing.target_of(stream.own_target))
        scheduler = self._scheduler
        return StepView(
            now=now,
            num_in_flight=self._flight.num_steps,
            num_decodes=num_rows,  # speculated tokens are rows like any other
            decode_context=context,
            earliest_deadline=deadline if deadline < math.inf else None,
            tightest_target=target / self._num_stages if target < math.inf else None,
            overhead=0.0,  # a step's seconds are counted from before it is planned
            step_time=self.step_time,
            max_num_seqs=scheduler.max_num_running_reqs,
            candidates=candidates,
            free_tokens=self._num_free_blocks * scheduler.block_size,
            long_prefill_token_threshold=scheduler.scheduler_config.long_prefill_token_threshold,
            caps=self._caps,
        )

    def _num_decode_rows(self, request: Any) -> int:
        """Rows that vLLM will give to a running request beyond its prompt: none while its next token is not due."""
        scheduler = self._scheduler
        computed, pending = request.num_computed_tokens, request.num_output_placeholders
        if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
            return 0
        if scheduler.current_step + 1 < request.next_decode_eligible_step:
            return 0
        rows: int = min(request.num_tokens_with_spec + pending, scheduler.max_model_len - 1) - computed
        return max(0, rows)

    def _prefills(self, prefilling: Sequence[Any]) -> list[_Prefill]:
        """Prompts to continue and to start, in the order that they are to be served: as many as a step can take."""
        found = [_Prefill(_candidate(request, request.num_computed_tokens), request, True) for request in prefilling]
        limit = min(_MAX_PREFILL_SEQUENCES, self._scheduler.max_num_running_reqs - len(self._scheduler.running))
        for request in islice(self._waiting(), max(0, limit)):
            start = request.num_computed_tokens or self._num_cached(request)
            found.append(_Prefill(_candidate(request, start), request, False))
        if self._is_first_come_first_served:
            found.sort(key=lambda prefill: self._rank(prefill.request) if self._fits(prefill) else math.inf)
        return found[:_MAX_PREFILL_SEQUENCES]

    def _make_way(self, prefills: Sequence[_Prefill], quotas: Sequence[Quota], num_tokens: int) -> None:
        """vLLM serves the running before the waiting: where these come first, leave them their share of the step."""
        order = [(prefills[quota.candidate].is_running, quota.tokens) for quota in quotas]
        order += [(prefill.is_running, 0) for prefill in prefills[len(quotas) :]]
        if (False, True) not in pairwise(is_running for is_running, _ in order):
            return
        first_waiting = next(i for i, (is_running, _) in enumerate(order) if not is_running)
        allowed = max(tokens for is_running, tokens in order[first_waiting:] if is_running)
        config, least = self._scheduler.scheduler_config, 1 + self._scheduler.num_spec_tokens
        most = config.long_prefill_token_threshold or num_tokens
        config.long_prefill_token_threshold = min(most, max(allowed, num_tokens // 2, least))

    def _waiting(self) -> Iterator[Any]:
        """All that wait, blocked ones too: vLLM looks at those only in steps that have tokens to give."""
        scheduler = self._scheduler
        queues = (getattr(scheduler, name, ()) for name in ("kv_holding_waiting", "skipped_waiting", "waiting"))
        return chain.from_iterable(queues)

    def _num_cached(self, request: Any) -> int:
        scheduler = self._scheduler
        if not scheduler.cache_config.enable_prefix_caching or request.skip_reading_prefix_cache:
            return 0
        find = scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        num_cached: int = find(request.block_hashes, request.num_tokens - 1)[1]
        return num_cached

    def _fits(self, prefill: _Prefill) -> bool:
        """Is there room for all of a prompt? Letting a prompt first that vLLM cannot start would help nobody."""
        num_tokens = self._num_free_blocks * self._scheduler.block_size
        return prefill.is_running or prefill.candidate.length <= num_tokens

    def _aligned(self, num_tokens: int) -> int:
        """Models with a recurrent state are prefilled by whole blocks: with less than one they would not get on."""
        needs_blocks = getattr(self._scheduler, "need_mamba_block_aligned_split", False)
        return max(num_tokens, self._scheduler.cache_config.block_size) if needs_blocks else num_tokens

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

    def _rank(self, request: Any) -> float:
        return self._streams[request.request_id].rank

    def _warn_if_infeasible(self) -> None:
        if self._policy.feasible_target is not None and not self._has_warned and self.step_time.is_calibrated:
            self._has_warned = True
            logger.warning(
                "evenflow: a target of %g ms cannot be kept beside prefill: even the least takes %.0f ms a token",
                1000 * self._pacing.target,
                1000 * self._policy.feasible_target * self._num_stages,
            )

    # ---- after a step ----

    def scheduled(self, output: Any) -> None:
        """vLLM made this of the step."""
        self._flight.add(self._next, output, self._scheduler.requests)

    def ended(self, output: Any) -> Step:
        """The step that gave this output is through."""
        return self._flight.end(output, self.clock())

    def emitted(self, step: Step, outputs: Mapping[int, Any]) -> None:
        """vLLM has handed out the step's tokens."""
        if step.shape is None:
            return
        if step.is_own_time:
            self.step_time.observe(step.shape, step.seconds)
        late: list[LateToken] = []
        num_tokens: dict[str, int] = {}
        for output in chain.from_iterable(outputs_of_client.outputs for outputs_of_client in outputs.values()):
            if output.new_token_ids:
                num_tokens[output.request_id] = len(output.new_token_ids)
                self._emit(output, step.ended_at, late)
        if len(self._streams) > len(self._scheduler.requests):
            self._forget_streams()
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_SAVES == 0:
            save_step_times(self.step_time, self._step_times_path)
        self._reporter.report(self._done(step, step.shape, late, num_tokens))

    def _forget_streams(self) -> None:
        """Drop what is known of requests that vLLM no longer has."""
        for request_id in self._streams.keys() - self._scheduler.requests.keys():
            self._reporter.left(request_id, self._streams.pop(request_id).num_tokens)

    def _emit(self, output: Any, now: float, late: list[LateToken]) -> None:
        stream = self._streams[output.request_id]
        stream.num_tokens += len(output.new_token_ids)
        if NO_DEADLINE < stream.deadline < now:
            late.append(LateToken(output.request_id, now - stream.last_token_time, now - stream.deadline))
        stream.deadline = self._pacing.next_deadline(stream.deadline, now, stream.own_target)
        stream.last_token_time = now

    def _done(self, step: Step, shape: StepShape, late: Sequence[LateToken], num_tokens: Mapping[str, int]) -> StepDone:
        num_running, num_waiting = self._scheduler.get_request_counts()
        decodes_alone = self._caps.step_shape(num_decodes=shape.decode_sequences, decode_context=shape.decode_context)
        return StepDone(
            step_id=self._num_steps,
            at=step.ended_at,
            seconds=step.seconds,
            is_own_time=step.is_own_time,
            predicted_seconds=step.predicted,
            predicted_decode_seconds=self.step_time.predict(decodes_alone) if shape.decode_sequences else 0.0,
            shape=shape,
            chunks=[
                ChunkDone(request_id, start, length, step.reasons.get(request_id, "budget"), request_id in num_tokens)
                for request_id, start, length in step.chunks
            ],
            decoded=[request_id for request_id in num_tokens if request_id in step.decode_ids],
            late=late,
            num_output_tokens=sum(num_tokens.values()),
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=self._scheduler.kv_cache_manager.usage,
            feasible_target=self._policy.feasible_target,
        )

    def close(self) -> None:
        """vLLM goes down."""
        if self.step_time.is_calibrated:
            save_step_times(self.step_time, self._step_times_path)
        self._reporter.close()


def _candidate(request: Any, start: int) -> Candidate:
    return Candidate(request.request_id, start, max(1, request.num_tokens - start), request.num_prompt_tokens)


def _attention_granules(config: Any) -> dict[str, int]:
    """The rows of a chunk by which its attention takes longer, for `ExecutorCaps`."""
    if not current_platform.is_cuda():
        return {}
    (num_processors,) = cuda_get_device_properties(0, ("multi_processor_count",))
    tiles_per_head = max(1, num_processors // config.model_config.get_num_attention_heads(config.parallel_config))
    return {"attention_tile": _CUDA_ATTENTION_TILE, "attention_wave": tiles_per_head * _CUDA_ATTENTION_TILE}


def _step_times_path(config: Any) -> Path:
    """Where step times of this model, cut over devices in this way, are kept. vLLM's own hashes say what matters."""
    parts = (config.model_config.compute_hash(), config.parallel_config.compute_hash(), config.cache_config.cache_dtype)
    return step_times_path("vllm", vllm.__version__, *parts, current_platform.get_device_name())
