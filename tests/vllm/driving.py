"""vLLM's real scheduler, plain or steered, driven in virtual time: a fake model runner with a cost for each step."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm", reason="runs in vLLM's environment: make test-vllm")
    import vllm
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    from evenflow.vllm.plugin import LatencyTargetScheduler

BLOCK_SIZE = 16
MAX_MODEL_LEN = 65536
TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_MODEL_LEN,
    "vocab_size": 1000,
}


def vllm_version() -> str:
    return str(vllm.__version__)


def model_folder() -> str:
    folder = Path(tempfile.gettempdir()) / "evenflow-tiny-llama"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA))
    return str(folder)


def make_scheduler(
    target: str | None = "50ms",
    *,
    is_async: bool = False,
    num_blocks: int = 20_000,
    max_num_seqs: int = 128,
    max_num_batched_tokens: int = 8192,  # vLLM's default on a large GPU
    prefix_caching: bool = False,
    num_speculative_tokens: int = 0,
    policy: str = "fcfs",
    num_stages: int = 1,
    chunked: bool = True,
    largest_graph: int = 0,
    block_size: int = BLOCK_SIZE,
    has_states: bool = False,
) -> Any:
    """A scheduler without a model behind it: vLLM's own where no target is given.

    `has_states`: every second layer has a recurrent state, cached at ends of blocks.
    """
    model_config = ModelConfig(model=model_folder(), skip_tokenizer_init=True, dtype="float32", seed=0)
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=chunked,
        is_encoder_decoder=False,
        policy=policy,
    )
    speculative = {"method": "ngram", "num_speculative_tokens": num_speculative_tokens, "prompt_lookup_max": 3}
    config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        speculative_config=SpeculativeConfig(**speculative) if num_speculative_tokens else None,
        additional_config={"evenflow": {"tbt_target": target}} if target else {},
    )
    config.scheduler_config.async_scheduling = is_async  # which vLLM never is on a CPU by itself
    config.cache_config.num_gpu_blocks = num_blocks
    config.parallel_config.pipeline_parallel_size = num_stages
    config.compilation_config.cudagraph_capture_sizes = list(range(8, largest_graph + 1, 8))
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if has_states:
        config.cache_config.mamba_cache_mode = "align"
        state = MambaSpec(block_size, ((2 * block_size,),), (torch.float32,), mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec(["states"], state))
    scheduler_class = LatencyTargetScheduler if target else (AsyncScheduler if is_async else Scheduler)
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


init_none_hash(sha256)  # once: up to 0.28 each call draws another root, and no prefix would be found again
_number = iter(range(10**9))


def make_request(
    num_prompt_tokens: int,
    max_tokens: int = 50,
    *,
    request_id: str | None = None,
    arrival: float = 0.0,
    prompt: Sequence[int] | None = None,
    extra_args: dict[str, Any] | None = None,
    block_size: int = BLOCK_SIZE,
) -> Any:
    number = next(_number)
    return Request(
        request_id or f"request-{number}",
        list(prompt) if prompt is not None else [(number * 31 + i) % 997 for i in range(num_prompt_tokens)],
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, extra_args=extra_args),
        None,
        arrival_time=arrival,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


@dataclass
class Ran:
    """A step that was scheduled, as the fake runner sees it."""

    output: Any
    seconds: float
    chunks: dict[str, int]  # tokens of prompts
    decodes: dict[str, int]  # rows beyond prompts
    samples: dict[str, int]  # how many tokens each request gets


def h200_like(num_rows: int, attention: int, num_decodes: int) -> float:
    """A fixed cost hidden behind compute, as on a GPU: 8 ms at least, 20 microseconds a row, 1 ns a position."""
    return max(0.008, 0.002 + 2e-5 * num_rows) + 1e-9 * attention + 1e-5 * num_decodes


@dataclass
class Driver:
    """Runs steps as vLLM's engine core does: one at a time, or the next one scheduled while one runs."""

    scheduler: Any
    cost: Callable[[int, int, int], float] = h200_like
    depth: int = 1
    num_accepted: int = 0  # of the speculated tokens in each step
    now: float = 0.0
    ran: list[Ran] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    _queue: deque[Ran] = field(default_factory=deque)
    _last_end: float = 0.0
    _submitted: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with suppress(AttributeError):
            self.scheduler.steering.core.clock = lambda: self.now

    def add(self, *requests: Any) -> None:
        for request in requests:
            request.arrival_time = self.now
            self.scheduler.add_request(request)

    def step(self) -> None:
        """One turn of the engine core's loop."""
        if self.scheduler.has_requests():
            ran = self._schedule()
            self._queue.append(ran)
            self._submitted[id(ran)] = self.now
            if len(self._queue) < self.depth and ran.output.total_num_scheduled_tokens:
                return
        if self._queue:
            self._finish(self._queue.popleft())

    def run(self, num_steps: int | None = None) -> None:
        while (self.scheduler.has_requests() or self._queue) and num_steps != 0:
            self.step()
            num_steps = None if num_steps is None else num_steps - 1
            assert len(self.ran) < 50_000, "no end in sight"

    def gaps(self, *request_ids: str) -> list[float]:
        times = [self.times[request_id] for request_id in request_ids]
        return [after - before for moments in times for before, after in pairwise(moments)]

    def _schedule(self) -> Ran:
        was_prefilling = {r.request_id: r.is_prefill_chunk for r in self.scheduler.running}
        output = self.scheduler.schedule()
        chunks: dict[str, int] = {}
        decodes: dict[str, int] = {}
        samples: dict[str, int] = {}
        attention = 0
        for request_id, length in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            attention += length * request.num_computed_tokens
            (chunks if was_prefilling.get(request_id, True) else decodes)[request_id] = length
            if not request.is_prefill_chunk:
                drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                samples[request_id] = 1 + min(self.num_accepted, drafts)
        seconds = self.cost(output.total_num_scheduled_tokens, attention, len(decodes)) if chunks or decodes else 0.0
        ran = Ran(output, seconds, chunks, decodes, samples)
        self.ran.append(ran)
        return ran

    def _finish(self, ran: Ran) -> None:
        self._last_end = max(self._submitted.pop(id(ran)), self._last_end) + ran.seconds
        self.now = max(self.now, self._last_end)
        self._deliver(ran)

    def _deliver(self, ran: Ran) -> None:
        ids = list(ran.output.num_scheduled_tokens)
        sampled = [self._sample(request_id, ran.samples.get(request_id, 0)) for request_id in ids]
        index = {request_id: number for number, request_id in enumerate(ids)}
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=sampled)
        for client in self.scheduler.update_from_output(ran.output, result).values():
            for output in client.outputs:
                if output.new_token_ids:
                    self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                    self.times.setdefault(output.request_id, []).append(self.now)

    def _sample(self, request_id: str, count: int) -> list[int]:
        known = self.tokens.get(request_id, [])
        return [hash((request_id, len(known) + i)) % 997 for i in range(count)]


@dataclass
class LaunchingDriver(Driver):
    """A GPU that replays graphs of up to so many rows; what is larger the host launches, and looks at nothing else."""

    largest_graph: int = 512
    launch_seconds: float = 0.03
    depth: int = 2

    def step(self) -> None:
        if self.scheduler.has_requests():
            ran = self._schedule()
            num_rows = ran.output.total_num_scheduled_tokens
            launched_at = self.now + (self.launch_seconds if num_rows > self.largest_graph else 0.002)
            self._last_end = max(max(self.now, self._last_end) + ran.seconds, launched_at)
            self.now = launched_at
            self.scheduler.get_grammar_bitmask(ran.output)  # where vLLM calls it
            self._submitted[id(ran)] = self._last_end
            self._queue.append(ran)
            if len(self._queue) < self.depth and num_rows:
                return
        if self._queue:
            ran = self._queue.popleft()
            self.now = max(self.now, self._submitted.pop(id(ran)))
            self._deliver(ran)
