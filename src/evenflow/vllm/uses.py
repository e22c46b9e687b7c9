"""What the adapter uses of vLLM: see `hosts.uses`. Imports no vLLM."""

from __future__ import annotations

from evenflow.hosts.uses import Uses

SCHEDULER = Uses(
    "vllm.v1.core.sched.scheduler:Scheduler",
    methods={
        "schedule": set[str](),  # whatever it takes is passed on
        "update_from_output": {"scheduler_output", "model_runner_output"},
        "add_request": {"request"},
        "get_grammar_bitmask": {"scheduler_output"},
        "get_request_counts": set[str](),
        "shutdown": set[str](),
    },
    attributes=(
        *("cache_config", "current_step", "kv_cache_config", "kv_cache_manager", "max_model_len"),
        *("max_num_running_reqs", "max_num_scheduled_tokens", "num_lookahead_tokens", "num_spec_tokens"),
        *("parallel_config", "policy", "requests", "running", "scheduler_config", "vllm_config", "waiting"),
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
USES = (SCHEDULER, REQUEST)
