"""What the adapter uses of SGLang: see `hosts.uses`. Imports no SGLang.

Where versions call a thing differently, `versions` chooses.
"""

from __future__ import annotations

from evenflow.advisor.sglang_flags import FLAGS
from evenflow.hosts.uses import Uses

SCHEDULER = Uses(
    "sglang.srt.managers.scheduler:Scheduler",
    methods={
        "__init__": {"server_args", "port_args"},
        "get_next_batch_to_run": {"running_batch", "last_batch"},
        "get_new_batch_prefill": {"running_batch"},
        "process_batch_result": {"batch", "result"},
        "run_batch": {"batch"},
        "_add_request_to_queue": {"req"},
        "get_num_allocatable_reqs": {"running_bs"},
        "on_idle": set[str](),
        "flush_cache": set[str](),  # this and the next two for the steps before the first request
        "is_fully_idle": set[str](),
        "run_event_loop": set[str](),
    },
    attributes=(
        *("chunked_prefill_size", "chunked_req", "dllm_config", "enable_hisparse", "enable_overlap_mlx"),
        *("enable_pdmux", "enable_priority_preemption", "enable_priority_scheduling", "forward_stream"),
        *("is_generation", "is_hybrid_swa", "is_mixed_chunk", "last_batch", "max_prefill_tokens", "max_req_input_len"),
        *("max_running_requests", "max_total_num_tokens", "min_free_slots_delayer", "model_config", "page_size"),
        *("output_streamer", "policy", "pool_stats_observer", "prefill_delayer", "request_receiver", "running_batch"),
        *(
            "server_args",
            "spec_algorithm",
            "tp_cpu_group",
            "tp_group",
            "tp_worker",
            "tree_cache",
            "truncation_align_size",
        ),
        "waiting_queue",
    ),
)
REQUEST = Uses(
    "sglang.srt.managers.schedule_batch:Req",
    attributes=(
        *("finished", "origin_input_ids", "output_ids", "prefix_len|prefix_indices", "return_logprob", "rid"),
        *("sampling_params", "seqlen"),
    ),
)
BATCH = Uses(
    "sglang.srt.managers.schedule_batch:ScheduleBatch",
    attributes=(
        *("reqs", "batch_is_full", "chunked_req", "decoding_reqs", "extend_lens", "forward_mode", "prefix_lens"),
        "return_logprob",
    ),
)
RESULT = Uses("sglang.srt.managers.utils:GenerationBatchResult", attributes=("copy_done",))
MODE = Uses("sglang.srt.model_executor.forward_batch_info:ForwardMode", attributes=("is_extend", "is_decode_or_idle"))
FORWARD_BATCH = Uses(
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch",
    attributes=("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "forward_mode", "seq_lens", "seq_lens_cpu"),
)
RECEIVER = Uses(
    "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver",
    methods={"recv_requests": set[str]()},
)
STREAMER = Uses(
    "sglang.srt.managers.scheduler_components.output_streamer:SchedulerOutputStreamer",
    methods={"stream_output": set[str]()},
)
SAMPLING = Uses("sglang.srt.sampling.sampling_params:SamplingParams", attributes=("custom_params", "max_new_tokens"))
POLICY = Uses("sglang.srt.managers.schedule_policy", attributes=("match_kv_cache|match_prefix_for_req",))
PREFILL_ADDER = Uses(
    "sglang.srt.managers.schedule_policy:PrefillAdder",
    methods={"__init__": {"page_size", "rem_chunk_tokens", "num_mixed_decode_tokens"}},
)
POOL_STATS = Uses(
    "sglang.srt.managers.scheduler_components.pool_stats_observer:PoolStats",
    methods={"get_kv_token_stats": set[str]()},
    attributes=("full_available_size", "full_evictable_size"),
)
LOGITS = Uses(
    "sglang.srt.layers.logits_processor:LogitsProcessor",
    methods={"_compute_lm_head": {"hidden_states", "lm_head"}},
)
RUNNER = Uses(
    "sglang.srt.model_executor.model_runner:ModelRunner", attributes=("attn_backend", "device", "dtype", "model")
)
MODEL = Uses(
    "sglang.srt.configs.model_config:ModelConfig",
    attributes=("dtype", "hf_config", "hf_text_config", "hidden_size", "quantization"),
)
PARALLEL = Uses(
    "sglang.srt.runtime_context:ParallelContext",
    attributes=("attn_dp_size", "tp_rank", "tp_size"),
    also_in=("sglang.srt.arg_groups.fields.parallel", "sglang.srt.server_args"),  # it answers settings too
)
GROUP = Uses("sglang.srt.distributed.parallel_state:GroupCoordinator", attributes=("rank", "ranks"))
_GROUPS = ("disagg", "exec_", "memory", "model", "observability", "parallel", "schedule", "serving")  # since 0.5.20
SETTINGS = Uses(
    "sglang.srt.server_args:ServerArgs",
    attributes=(
        *("attention_backend", "cuda_graph_config", "disaggregation_mode", "dtype", "enable_dp_attention"),
        *("kv_cache_dtype", "model_path", "pp_size", "quantization", "tp_size"),
        *FLAGS,
    ),
    also_in=tuple(f"sglang.srt.arg_groups.fields.{group}" for group in _GROUPS),
)
GRAPHS = Uses("sglang.srt.model_executor.cuda_graph_config:CudaGraphConfig", attributes=("decode", "prefill"))
GRAPHS_OF_PHASE = Uses("sglang.srt.model_executor.cuda_graph_config:PhaseConfig", attributes=("backend", "bs"))
HOOKS = Uses("sglang.srt.plugins.hook_registry:HookRegistry", methods={"register": {"target", "hook", "hook_type"}})
FLASH_ATTENTION = Uses(
    "sglang.srt.layers.attention.flashattention_backend:FlashAttentionBackend",
    attributes=("has_local_attention", "init_forward_metadata", "is_encoder_decoder", "num_kv_heads", "use_mla"),
)
FLASH_ATTENTION_MODULE = Uses(
    "sglang.srt.layers.attention.flashattention_backend", attributes=("flash_attn_with_kvcache",)
)
FLASHINFER = Uses(
    "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend",
    attributes=(
        *("decode_use_tensor_cores", "decode_wrappers", "init_forward_metadata", "prefill_wrapper_ragged"),
        *("prefill_wrappers_paged", "use_paged"),
    ),
)
FLASHINFER_UPDATER = Uses(
    "sglang.srt.layers.attention.flashinfer_backend:FlashInferIndicesUpdaterPrefill",
    attributes=(
        *("data_type", "head_dim", "num_kv_heads", "num_qo_heads", "q_data_type", "update"),
        "update_single_wrapper",
    ),
)
USES = (
    *(
        SCHEDULER,
        REQUEST,
        BATCH,
        RESULT,
        MODE,
        FORWARD_BATCH,
        RECEIVER,
        STREAMER,
        SAMPLING,
        POLICY,
        PREFILL_ADDER,
        POOL_STATS,
    ),
    *(LOGITS, RUNNER, MODEL, PARALLEL, GROUP, SETTINGS, GRAPHS, GRAPHS_OF_PHASE, HOOKS),
    *(FLASH_ATTENTION, FLASH_ATTENTION_MODULE, FLASHINFER, FLASHINFER_UPDATER),
)
