"""What the adapter uses of vLLM: see `hosts.uses`. Imports no vLLM."""

from __future__ import annotations

from evenflow.hosts.uses import Uses

SCHEDULER = Uses(
    "vllm.v1.core.sched.scheduler:Scheduler",
    methods={
        "schedule": {"throttle_prefills"},
        "update_from_output": {"scheduler_output", "model_runner_output"},
        "add_request": {"request"},
        "get_grammar_bitmask": {"scheduler_output"},
        "get_request_counts": set[str](),
        "shutdown": set[str](),
    },
    attributes=(
        *("block_size", "cache_config", "current_step", "kv_cache_config", "kv_cache_manager", "max_model_len"),
        *("max_num_running_reqs", "max_num_scheduled_tokens", "need_mamba_block_aligned_split"),
        *("num_lookahead_tokens", "num_sampled_tokens_per_step", "num_spec_tokens"),
        *("num_waiting_for_streaming_input", "parallel_config", "policy", "requests", "running"),
        *("scheduler_config", "vllm_config", "waiting"),
    ),
)
REQUEST = Uses(
    "vllm.v1.request:Request",
    attributes=(
        *("arrival_time", "block_hashes", "is_prefill_chunk", "max_tokens", "next_decode_eligible_step"),
        *("num_computed_tokens", "num_output_placeholders", "num_prompt_tokens", "num_tokens"),
        *("num_tokens_with_spec", "priority", "request_id", "sampling_params", "skip_reading_prefix_cache"),
    ),
)
SETTINGS = Uses(
    "vllm.config.scheduler:SchedulerConfig",
    methods={"get_scheduler_cls": set[str]()},
    attributes=(
        *("enable_chunked_prefill", "long_prefill_token_threshold", "max_num_batched_tokens", "max_num_seqs"),
        *("prefill_schedule_interval", "scheduler_cls", "stream_interval"),
    ),
)
QUEUES = Uses("vllm.v1.core.sched.request_queue", attributes=("SchedulingPolicy",))
CACHE = Uses(
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
    methods={"find_longest_cache_hit": {"block_hashes", "max_cache_hit_length"}},
)
BLOCKS = Uses("vllm.v1.core.block_pool:BlockPool", methods={"get_num_free_blocks": set[str]()})
WORKER = Uses(
    "vllm.v1.worker.gpu_worker:Worker",
    methods={"compile_or_warm_up_model": set[str]()},
    attributes=("device", "model_runner", "vllm_config"),
    also_in=("vllm.v1.worker.worker_base",),
)
RUNNERS = tuple(
    Uses(f"vllm.v1.worker.{module}:GPUModelRunner", methods={"_dummy_run": {"num_tokens", "skip_eplb"}})
    for module in ("gpu_model_runner", "gpu.model_runner")
)
LAYERS = Uses("vllm.model_executor.layers.linear", attributes=("LinearBase", "UnquantizedLinearMethod"))
USES = (SCHEDULER, REQUEST, SETTINGS, QUEUES, CACHE, BLOCKS, WORKER, *RUNNERS, LAYERS)
