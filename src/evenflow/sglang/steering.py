"""SGLang's adapter to evenflow's steering: decodes in every step, and as much prefill as the `target` policy allows.

What evenflow relies on in SGLang is used here, and checked in `hooks`. Every rank of a tensor-parallel group has a
scheduler of its own, and all must decide alike: the first one decides and tells the others.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import sglang
import torch
from sglang.srt.utils import broadcast_pyobj

from evenflow.best_effort import BestEffort
from evenflow.core.plan import ChunkReason, ExecutorCaps
from evenflow.core.policies import WHOLE_PROMPTS, PolicySpec
from evenflow.core.policy import Candidate
from evenflow.core.roofline import WaveKernel
from evenflow.hosts.in_flight import InFlightStep
from evenflow.hosts.prior import Prior, prior_of
from evenflow.hosts.settings import RequestSettings, Settings
from evenflow.hosts.steering import Decode, Host, HostLoad, HostRequest, Steering
from evenflow.sglang import versions
from evenflow.sglang.mixed_attention import install_flash_attention, install_flashinfer
from evenflow.step_time_store import step_times_path

Result = TypeVar("Result")

logger = logging.getLogger("sglang.evenflow")

_MAX_PREFILL_SEQUENCES = 16  # considered for one step
_GRAPHS_OFF, _PIECEWISE_GRAPHS = "disabled", "tc_piecewise"
_UNMIXED_BACKENDS = ("dual_chunk_flash_attn", "flashmla_sparse_q8")


class Decision(NamedTuple):
    """How a step's prefill is limited. The same on every rank."""

    may_prefill: bool = True
    budget: int | None = None  # of the step's tokens; None: SGLang's own, and its own choice whether to mix
    order: list[str] | None = None  # of the waiting requests, if it changes
    passing: tuple[str, ...] = ()  # waiting requests to start in place of the prompt that was begun


class SglangSteering(ABC):
    """What the hooks call. One for each scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.best_effort = BestEffort(logger)
        self.limits_prefill = False  # of the batch that was scheduled last
        install_flash_attention(scheduler)
        self._has_flashinfer = install_flashinfer(scheduler)

    def follow(self, work: Callable[[], Result]) -> Result | None:
        """Whatever goes wrong in evenflow must not end SGLang."""
        return self.best_effort.run("following SGLang's steps", work, None)

    def begin_step(self) -> None:
        """SGLang is about to schedule a step."""
        return

    @contextmanager
    def steered_prefill(self, running_batch: Any) -> Iterator[bool]:
        """Within this, SGLang chooses the step's prefill, unless it yields False."""
        scheduler = self._scheduler
        decision = self._decide(running_batch)
        self.limits_prefill = decision.budget is not None
        before = scheduler.chunked_prefill_size, scheduler.is_mixed_chunk, scheduler.min_free_slots_delayer
        if decision.budget is not None:  # which --min-free-slots-delay must not hold back
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = decision.budget, True
            scheduler.min_free_slots_delayer = None
        if decision.order is not None:
            requests = {request.rid: request for request in scheduler.waiting_queue}
            scheduler.waiting_queue[:] = [requests[request_id] for request_id in decision.order]
        try:
            with self._set_aside(decision.passing):
                yield decision.may_prefill
        finally:
            scheduler.chunked_prefill_size, scheduler.is_mixed_chunk, scheduler.min_free_slots_delayer = before

    @contextmanager
    def _set_aside(self, passing: Sequence[str]) -> Iterator[None]:
        """SGLang continues the prompt that it has begun, unless it does not see it; nor may it begin a second one."""
        scheduler = self._scheduler
        if not passing:
            yield
            return
        begun, waiting = scheduler.chunked_req, scheduler.waiting_queue
        scheduler.chunked_req, scheduler.waiting_queue = None, [one for one in waiting if one.rid in passing]
        try:
            yield
        finally:
            scheduler.chunked_req = begun
            scheduler.waiting_queue += [one for one in waiting if one.rid not in passing]

    @abstractmethod
    def _decide(self, running_batch: Any) -> Decision: ...

    def scheduled(self, batch: Any) -> None:
        """SGLang scheduled this batch; None: there is nothing to run."""
        if self.limits_prefill:  # by --prefill-decode-interval the next steps would have none
            self._scheduler._prefill_decode_interval_remaining = 0

    def launched(self) -> None:
        """SGLang has launched the batch that was scheduled last."""
        return

    @contextmanager
    def result_of(self, batch: Any, result: Any) -> Iterator[None]:
        """Within this, SGLang hands out a batch's tokens."""
        yield

    def add(self, request: Any) -> None:
        """A request joined the waiting ones."""
        return

    def idle(self) -> None:
        """Nothing runs or waits."""
        return

    @property
    def _has_prefill(self) -> bool:
        """The same on every rank."""
        return bool(self._scheduler.waiting_queue) or self._scheduler.chunked_req is not None

    def _share(self, decision: Decision | None) -> Decision:
        """The first rank's decision, on every rank."""
        group, data = self._scheduler.tp_group, [decision] if decision is not None else []
        (shared,) = broadcast_pyobj(data, group.rank, self._scheduler.tp_cpu_group, src=group.ranks[0])
        return Decision(*shared)


class _Follower(SglangSteering):
    """Of a rank that does what the first one decides."""

    def _decide(self, running_batch: Any) -> Decision:
        return self._share(None) if self._has_prefill else Decision()


class _Leader(SglangSteering):
    """Of the rank that decides: translates between its scheduler and `Steering`."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        super().__init__(scheduler)
        estimate = partial(_prior, scheduler, self._has_flashinfer)
        prior = self.best_effort.run("estimating step times", estimate, Prior())
        host = Host(
            caps=ExecutorCaps(
                max_prefill_sequences=_MAX_PREFILL_SEQUENCES,
                row_buckets=_graph_sizes(),
                attention_waves=prior.waves,
            ),
            budget=scheduler.chunked_prefill_size or scheduler.max_prefill_tokens,
            max_num_seqs=scheduler.max_running_requests,
            step_times_path=self.best_effort.run(
                "keeping step times", lambda: step_times_path("sglang", *_step_time_key()), None
            ),
            logger=logger,
            prior=prior.costs,
            own_policy=_own_policy(scheduler),
        )
        self.core = Steering(host, settings)
        self._request_settings = RequestSettings(settings.classes, logger)
        self._has_followers = versions.tp_size() > 1
        self._next = InFlightStep()  # the one being scheduled
        self._open: dict[str, Any] = {}  # requests that SGLang has
        self._waiting: set[str] = set()  # of these, those that have not started
        self._partial: Any = None  # the request whose prompt was computed in part
        self._places: dict[str, int] = {}  # of prompts, in order of service
        self._passing: list[Any] = []  # waiting requests that should pass it in the step being scheduled
        self._may_pass = True
        self._ends: deque[Any] = deque()  # events at the ends of steps in flight, oldest first
        self._last_end: Any = None  # that of the step whose result came last
        self._skipped_decodes = False  # the last step had prefill and left out the decodes: the next one is theirs
        self._is_saved = True
        self._can_chunk = scheduler.chunked_prefill_size is not None
        self.core.log_start(f"SGLang {sglang.__version__}", None if self._can_chunk else "chunked prefill is off")

    # ---- before a step ----

    def add(self, request: Any) -> None:
        waiting = self._scheduler.waiting_queue
        if not waiting or waiting[-1] is not request:
            return  # SGLang refused it
        self._waiting.add(request.rid)
        if request.rid in self._open:
            return  # it ran before, and was retracted
        if self._steers:
            versions.match_prefix(request, self._scheduler.tree_cache)
        self._open[request.rid] = request
        self.core.add(
            HostRequest(
                id=request.rid,
                arrival_time=time.time(),
                num_prompt_tokens=len(request.origin_input_ids),
                num_tokens=request.seqlen,
                num_cached_tokens=min(versions.num_computed(request), request.seqlen - 1),
                max_tokens=request.sampling_params.max_new_tokens,
                **self._request_settings.read(request.sampling_params.custom_params),
            )
        )

    @property
    def _steers(self) -> bool:
        """False: SGLang's own order and budget are left as they are."""
        return self._can_chunk and self.core.is_active

    def begin_step(self) -> None:
        self.core.begin_step()
        self._next, self._passing = InFlightStep(self.core.clock()), []
        if len(self._waiting) != len(self._scheduler.waiting_queue):  # some were aborted
            queued = {request.rid for request in self._scheduler.waiting_queue}
            for request_id in self._waiting - queued:
                self._open.pop(request_id, None)
            self._waiting &= queued

    def _decide(self, running_batch: Any) -> Decision:
        decoding = [request for request in running_batch.reqs if not request.finished()]
        self._next.decode_ids = {request.rid for request in decoding}
        steer = partial(self._steer, running_batch, decoding)  # if it fails, the other ranks still wait for a decision
        decision = self.best_effort.run("the latency target", steer, Decision())
        return self._share(decision) if self._has_followers and self._has_prefill else decision

    def _steer(self, running_batch: Any, decoding: Sequence[Any]) -> Decision:
        if not self._steers:
            return Decision()
        order, is_held = self._order(), self._skipped_decodes and bool(decoding)
        requests = [] if is_held else list(self._prefills(running_batch, order))
        candidates = [_candidate(request) for request in requests]
        _, quotas = self.core.plan(
            self._next.planned_at,
            [Decode(request.rid, 1, request.seqlen) for request in decoding],
            candidates,
            free_tokens=self._num_free_tokens,
            long_prefill_token_threshold=0,
        )
        num_tokens = sum(quota.tokens for quota in quotas)
        self._passing = self._find_passing(requests[1:], num_tokens) if self._scheduler.chunked_req is not None else []
        if self._passing:
            self._next.reasons = {request.rid: ChunkReason.END_OF_PROMPT for request in self._passing}
            num_tokens = sum(self._paged(request.seqlen) for request in self._passing)  # even if nothing is cached
        else:
            self._next.reasons = {candidates[quota.candidate].request_id: quota.reason for quota in quotas}
        # A chunk is at least a page. SGLang subtracts a token for each running request, finished ones too.
        budget = max(num_tokens, self._scheduler.page_size) + len(running_batch.reqs)
        names = None if order is None else [request.rid for request in order]
        passing = tuple(request.rid for request in self._passing)
        return Decision(not is_held, budget, names, passing)

    def _find_passing(self, waiting: Sequence[Any], num_tokens: int) -> list[Any]:
        """The waiting prompts that rank before the one begun and fit whole into a step of this much prefill."""
        scheduler, begun = self._scheduler, self._scheduler.chunked_req
        if not (self._may_pass and self._orders_by_rank) or scheduler.is_hybrid_swa:
            return []
        # Memory beyond what the one begun still needs; the other half is left for streams to grow.
        room = self._num_free_tokens // 2 - _candidate(begun).length
        found: list[Any] = []
        for request in waiting:
            if self._places[request.rid] > self._places[begun.rid] or request.return_logprob:
                break
            versions.match_prefix(request, scheduler.tree_cache)
            num_tokens -= self._paged(_candidate(request).length)
            room -= request.seqlen + request.sampling_params.max_new_tokens
            if num_tokens < 0 or room < 0:
                break
            found.append(request)
        return found

    def _paged(self, num_tokens: int) -> int:
        page_size: int = self._scheduler.page_size
        return -(-num_tokens // page_size) * page_size

    def _order(self) -> list[Any] | None:
        """The waiting requests in order of service, if that is not their order."""
        waiting, begun = self._scheduler.waiting_queue, self._scheduler.chunked_req
        request_ids = [request.rid for request in ((begun, *waiting) if begun is not None else waiting)]
        self._places = self.core.line_up(self._next.planned_at, request_ids, _MAX_PREFILL_SEQUENCES)
        if not self._orders_by_rank or len(waiting) < 2:
            return None
        free = self._num_free_tokens
        # One that SGLang cannot start for want of memory would block those behind it.
        in_order = sorted(waiting, key=lambda request: (_candidate(request).length > free, self._places[request.rid]))
        return in_order if in_order != waiting else None

    def _prefills(self, running_batch: Any, order: list[Any] | None) -> Iterator[Any]:
        """The prompt to continue and those to start, in serving order, up to what a step takes."""
        scheduler = self._scheduler
        if scheduler.chunked_req is not None:
            yield scheduler.chunked_req
        is_full = running_batch.batch_is_full and not (scheduler.enable_priority_preemption or scheduler.is_hybrid_swa)
        limit = 0 if is_full else scheduler.get_num_allocatable_reqs(len(running_batch.reqs))
        yield from islice(order or scheduler.waiting_queue, min(_MAX_PREFILL_SEQUENCES, max(0, limit)))

    @property
    def _orders_by_rank(self) -> bool:
        """SGLang's other policies have their own order."""
        return self._scheduler.policy.policy.value == "fcfs" and not self._scheduler.enable_priority_scheduling

    @property
    def _num_free_tokens(self) -> int:
        stats = self._scheduler.pool_stats_observer.get_pool_stats()
        count: int = stats.full_available_size + stats.full_evictable_size
        return count

    # ---- after a step ----

    def scheduled(self, batch: Any) -> None:
        super().scheduled(batch)
        if self._partial is not None and self._partial.finished():  # aborted: no batch will hold it again
            self._open.pop(self._partial.rid, None)
        self._partial = self._scheduler.chunked_req
        # Where SGLang refuses those that should pass, it must continue the prompt begun before they try again.
        self._may_pass = not self._passing or (batch is not None and batch.forward_mode.is_extend())
        if batch is None:
            return
        step, self._is_saved = self._next, False
        is_prefill = batch.forward_mode.is_extend()
        decoding = (batch.decoding_reqs or []) if is_prefill else batch.reqs
        self._skipped_decodes = bool(is_prefill and not decoding and step.decode_ids)
        step.decode_ids = {request.rid for request in decoding}
        started = batch.reqs[: len(batch.reqs) - len(decoding)]  # a mixed batch has its decodes last
        if started:
            lengths = zip(started, batch.prefix_lens, batch.extend_lens, strict=False)
            step.chunks = [(request.rid, start, length) for request, start, length in lengths]
            self._waiting.difference_update(request.rid for request in started)
        ended = [request.rid for request in started if request is not batch.chunked_req]
        for request_id in ended:
            step.reasons.setdefault(request_id, ChunkReason.END_OF_PROMPT)
        decodes = [Decode(request.rid, 1, request.seqlen) for request in decoding]
        self.core.scheduled(step, decodes, len(ended))

    def launched(self) -> None:
        self._ends.append(self._record_end())
        self.core.launched(None)

    def _record_end(self) -> Any:
        """An event at the end of what was launched; None without CUDA, or if SGLang has no stream for forward passes.

        The host's clock says little: FlashInfer's planning waits for the step before, so that SGLang sees each end
        only once it has launched the next step.
        """
        stream = getattr(self._scheduler, "forward_stream", None)
        if stream is None or not torch.cuda.is_available():
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def _device_seconds(self) -> float | None:
        """From the end of the last step to that of the one whose result has come, by the device's clock."""
        before, self._last_end = self._last_end, self._ends.popleft() if self._ends else None
        if before is None or self._last_end is None:
            return None
        self._last_end.synchronize()  # it was recorded just after the result was copied
        seconds: float = before.elapsed_time(self._last_end) / 1000
        return seconds

    @contextmanager
    def result_of(self, batch: Any, result: Any) -> Iterator[None]:
        # Results come in the order of batches, of which SGLang keeps only copies: no step needs a key.
        step, num_before = None, [len(request.output_ids) for request in batch.reqs]
        if result.copy_done is not None:
            result.copy_done.synchronize()  # as SGLang does next
            step = self.follow(self._ended)
        yield
        # Without overlap, only SGLang's own look at the tokens waits for them.
        if result.copy_done is None:
            step = self.follow(self._ended)
        if step is not None:
            self.follow(partial(self._emitted, step, batch, num_before))

    def _ended(self) -> InFlightStep:
        return self.core.ended(None, self._device_seconds())

    def _emitted(self, step: InFlightStep, batch: Any, num_before: Sequence[int]) -> None:
        tokens = {
            request.rid: list(request.output_ids[before:])
            for request, before in zip(batch.reqs, num_before, strict=True)
            if len(request.output_ids) > before
        }
        for request in batch.reqs:
            if request.finished():
                self._open.pop(request.rid, None)
        num_waiting = len(self._scheduler.waiting_queue)
        usage = self._scheduler.pool_stats_observer.get_pool_stats().get_kv_token_stats()[1]
        self.core.emitted(step, tokens, self._open, HostLoad(len(self._open) - num_waiting, num_waiting, usage))

    def idle(self) -> None:
        """SGLang ends its schedulers without notice: keep what was learned while there is time."""
        if not self._is_saved:
            self.core.save()
            self._is_saved = True


def make_steering(scheduler: Any, settings: Settings) -> SglangSteering | None:
    """None: under these settings evenflow can neither steer SGLang nor follow its steps, and the log says why."""
    if (reason := _why_not(scheduler)) is not None:
        logger.warning("evenflow: no latency target is kept and no steps are reported: %s", reason)
        return None
    return _Leader(scheduler, settings) if versions.tp_rank() == 0 else _Follower(scheduler)


def _why_not(scheduler: Any) -> str | None:
    """The setting under which SGLang cannot mix decodes into a prefill of any size."""
    setting = versions.setting
    is_piecewise = setting("cuda_graph_config").prefill.backend == _PIECEWISE_GRAPHS
    # SGLang itself refuses these together with --enable-mixed-chunk.
    unmixed = ("enable_encoder_swa_bounded_replay", "enable_cp_tp_group_sharing", "enable_megamoe_for_layernorm_sp")
    reasons = (
        (not scheduler.is_generation, "this model generates no tokens"),
        (not scheduler.spec_algorithm.is_none(), "speculative decoding is on, which SGLang cannot mix with prefill"),
        (setting("pp_size") > 1, "the model is split into pipeline stages (--pp-size)"),
        (versions.has_dp_attention(), "--enable-dp-attention or --attn-dp-size is on: its ranks must schedule alike"),
        (
            setting("disaggregation_mode") != "null",
            "prefill and decode run in different servers (--disaggregation-mode)",
        ),
        (scheduler.enable_pdmux or scheduler.enable_overlap_mlx, "SGLang schedules in another way on this device"),
        (scheduler.dllm_config is not None, "this is a diffusion model"),
        (scheduler.enable_hisparse, "--enable-hisparse is on"),
        (scheduler.prefill_delayer is not None, "--enable-prefill-delayer is on"),
        (scheduler.truncation_align_size is not None, "--enable-deterministic-inference fixes the sizes of chunks"),
        (setting("attention_backend") in _UNMIXED_BACKENDS, "this attention backend cannot mix prefill and decodes"),
        (setting("dsa_prefill_backend") in _UNMIXED_BACKENDS, "--dsa-prefill-backend cannot mix prefill and decodes"),
        (is_piecewise and not versions.mixes_piecewise_graphs(), "--cuda-graph-backend-prefill is not `breakable`"),
        *((bool(setting(name)), f"--{name.replace('_', '-')} cannot mix prefill and decodes") for name in unmixed),
    )
    return next((reason for is_so, reason in reasons if is_so), None)


def _own_policy(scheduler: Any) -> PolicySpec | None:
    """What SGLang does without a target, if it is a policy of evenflow's."""
    if scheduler.chunked_prefill_size is None:
        return WHOLE_PROMPTS
    return PolicySpec("fixed", scheduler.chunked_prefill_size) if scheduler.is_mixed_chunk else None


def _candidate(request: Any) -> Candidate:
    start = versions.num_computed(request)
    num_prompt_tokens = len(request.origin_input_ids)
    return Candidate(request.rid, start, max(1, request.seqlen - start), num_prompt_tokens)


def _graph_sizes() -> tuple[int, ...]:
    """Sizes of captured graphs: of decodes, and of steps with prefill where these are captured too."""
    config = versions.setting("cuda_graph_config")
    phases = (config.decode, config.prefill)
    return tuple(sorted({size for phase in phases if phase.backend != _GRAPHS_OFF for size in phase.bs or ()}))


def _prior(scheduler: Any, has_flashinfer: bool) -> Prior:
    if not torch.cuda.is_available():
        return Prior()
    model, device = scheduler.model_config, torch.cuda.get_device_name()
    kernel = WaveKernel.FLASHINFER if has_flashinfer else None
    if versions.setting("attention_backend") == "fa3":
        kernel = WaveKernel.FLASH_ATTENTION_3
    return prior_of(
        model.hf_text_config,
        device,
        versions.tp_size(),
        model.dtype.itemsize,
        quantization=model.quantization,
        quantization_config=getattr(model.hf_config, "quantization_config", None),
        cache_itemsize=1.0 if "fp8" in versions.setting("kv_cache_dtype") else 2.0,
        kernel=kernel,
    )


def _step_time_key() -> tuple[str, ...]:
    """What the step times of this model on this device depend on."""
    settings = ("model_path", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return (sglang.__version__, *(str(versions.setting(name)) for name in settings), device)
