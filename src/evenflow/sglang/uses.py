"""What the adapter uses of SGLang: see `hosts.uses`. Imports no SGLang."""

from __future__ import annotations

from evenflow.hosts.uses import Uses

SCHEDULER = Uses(
    "sglang.srt.managers.scheduler:Scheduler",
    methods={
        "get_next_batch_to_run": {"running_batch", "last_batch"},
        "get_new_batch_prefill": {"running_batch"},
        "process_batch_result": {"batch", "result"},
        "run_batch": {"batch"},
        "_add_request_to_queue": {"req"},
        "get_num_allocatable_reqs": {"running_bs"},
        "on_idle": set[str](),
    },
    attributes=(
        *("chunked_prefill_size", "chunked_req", "dllm_config", "enable_hisparse", "enable_overlap_mlx"),
        *("enable_pdmux", "enable_priority_preemption", "enable_priority_scheduling", "is_generation"),
        *("is_hybrid_swa", "is_mixed_chunk", "max_prefill_tokens", "max_running_requests", "model_config"),
        *("page_size", "policy", "pool_stats_observer", "prefill_delayer", "ps", "server_args", "spec_algorithm"),
        *("tp_cpu_group", "tp_group", "tp_worker", "tree_cache", "truncation_align_size", "waiting_queue"),
    ),
)
REQUEST = Uses(
    "sglang.srt.managers.schedule_batch:Req",
    attributes=(
        *("finished", "origin_input_ids", "output_ids", "prefix_indices", "return_logprob", "rid"),
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
PREFILL_ADDER = Uses(
    "sglang.srt.managers.schedule_policy:PrefillAdder",
    methods={"__init__": {"page_size", "rem_chunk_tokens", "num_mixed_decode_tokens"}},
)
LOGITS = Uses(
    "sglang.srt.layers.logits_processor:LogitsProcessor",
    methods={"_compute_lm_head": {"hidden_states", "lm_head"}},
)
SETTINGS = Uses(
    "sglang.srt.server_args:ServerArgs",
    attributes=(
        *("attention_backend", "cuda_graph_config", "disaggregation_mode", "dtype", "enable_dp_attention"),
        *("kv_cache_dtype", "model_path", "pp_size", "quantization", "tp_size"),
    ),
)
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
    *(SCHEDULER, REQUEST, BATCH, RESULT, PREFILL_ADDER, LOGITS, SETTINGS),
    *(FLASH_ATTENTION, FLASH_ATTENTION_MODULE, FLASHINFER, FLASHINFER_UPDATER),
)
