"""Which of llama.cpp's tests are about llama.cpp alone, in groups, with the reason for each.

What no pattern names is standard behaviour: OpenAI's API, Anthropic's, or what vLLM and llama.cpp have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class Group:
    """Tests by name, as FILE::TEST[CASE] with shell patterns, and why they are not run."""

    reason: str
    patterns: tuple[str, ...]


LLAMA_SPECIFIC = {
    "large models": Group(
        "downloads models of 1 to 8 billion parameters and checks what they say",
        (
            "test_tool_call.py::test_completion_with_required_tool_real_model*",
            "test_tool_call.py::test_weather*",
            "test_tool_call.py::test_calc_result*",
            "test_tool_call.py::test_thoughts*",
            "test_tool_call.py::test_hello_world*",
            "test_compat_anthropic.py::test_anthropic_thinking_with_reasoning_model*",
            "test_completion.py::test_completion_stream_with_openai_library_stops",
        ),
    ),
    "other models": Group(
        "needs a model of a kind that evenflow does not read: split GGUF files, LoRA adapters, a draft model",
        ("test_basic.py::test_load_split_model", "test_lora.py::*", "test_speculative.py::*"),
    ),
    "images": Group(
        "sends images; evenflow's models read text, and an image is refused with status 400, not 500",
        (
            "test_vision_api.py::*",
            "test_security.py::test_local_media_file*",
            "test_compat_anthropic.py::*image*",
            "test_compat_anthropic.py::*vision*",
        ),
    ),
    "encoders": Group(
        "ranks documents with a cross-encoder, or counts tokens of BERT's; evenflow's architectures are decoders",
        ("test_rerank.py::*", "test_embedding.py::test_embedding_usage*"),
    ),
    "slots": Group(
        "reads, saves or fills llama.cpp's slots, each a fixed part of the KV memory; evenflow shares blocks instead",
        (
            "test_basic.py::test_server_slots",
            "test_slot_save.py::*",
            "test_kv_keep_only_active.py::*",
            "test_completion.py::test_completion_parallel_slots*",
            "test_completion.py::test_completion_unified*",
            "test_completion.py::test_cancel_request",
            "test_chat_completion.py::test_chat_completion_cached_tokens",
        ),
    ),
    "context": Group(
        "cuts a text at the end of the context, or renders one beyond it; evenflow refuses such requests, as vLLM does",
        (
            "test_template.py::test_reasoning[[]Cohere*-tools2]",
            "test_ctx_shift.py::test_ctx_shift_enabled",
            "test_ctx_shift.py::test_ctx_shift_disabled_stream",
            "test_ctx_shift.py::test_ctx_shift_disabled_short_prompt[[]-1-*",
        ),
    ),
    "own fields": Group(
        "asserts fields that only llama.cpp has: generation_settings, timings, progress, ids in logprobs, token counts "
        "in errors, prompts as objects or of text and ids mixed, words as keys of logit_bias, embeddings of each token",
        (
            "test_basic.py::test_server_props",
            "test_basic.py::test_server_model_aliases_and_tags",
            "test_completion.py::test_completion_stream[[]*",
            "test_completion.py::test_completion_response_fields*",
            "test_completion.py::test_completion_with_tokens_input",
            "test_completion.py::test_json_prompt*",
            "test_completion.py::test_logit_bias[[]False-*",
            "test_completion.py::test_n_probs*",
            "test_ignore_eos.py::*",
            "test_chat_completion.py::test_chat_completion_with_timings_per_token",
            "test_chat_completion.py::test_context_size_exceeded*",
            "test_chat_completion.py::test_return_progress*",
            "test_chat_completion.py::test_verbose_debug",
            "test_compat_oai_responses.py::test_responses_stream_with_llama_telemetry",
            "test_embedding.py::test_embedding_pooling_none*",
            "test_embedding.py::test_embedding_mixed_input[[]input[357]-*",
        ),
    ),
    "templates": Group(
        "names a template built into llama.cpp, or expects what it adds to templates: dates, an answer to continue",
        (
            "test_chat_completion.py::test_chat_template",
            "test_chat_completion.py::test_apply_chat_template",
            "test_chat_completion.py::test_chat_template_assistant_prefill*",
            "test_template.py::test_date_inside_prompt*",
        ),
    ),
    "metrics": Group(
        "reads metrics by llama.cpp's names; evenflow's have vLLM's", ("test_metrics.py::*", "test_sleep.py::*")
    ),
    "router": Group(
        "starts a server of many models that loads and unloads them", ("test_router.py::*", "test_stream.py::*")
    ),
    "page": Group(
        "checks files of llama.cpp's web page, and the options for it",
        ("test_basic.py::test_no_ui", "test_security.py::test_access_static_assets_without_api_key"),
    ),
    "cross-origin": Group(
        "expects that every site, or every local one, may send requests with credentials; evenflow names the sites",
        ("test_security.py::test_cors_o*",),
    ),
    "tools on the server": Group(
        "lets the server run tools, programs and requests to other servers",
        (
            "test_tools_builtin.py::*",
            "test_mcp_servers.py::*",
            "test_proxy.py::*",
            "test_security.py::test_cors_proxy*",
        ),
    ),
    "other APIs": Group(
        "speaks an API that only llama.cpp has: /infill, and Google's /predict",
        ("test_infill.py::*", "test_compat_gcp.py::*"),
    ),
    "other rules": Group(
        "expects an answer to nothing (no messages, an empty text to embed), which Anthropic and OpenAI refuse, or a "
        "refusal of two assistant's turns in a row, which OpenAI takes",
        (
            "test_compat_anthropic.py::test_anthropic_empty_messages",
            "test_chat_completion.py::test_invalid_chat_completion_req[[]messages7]",
            "test_embedding.py::test_embedding_mixed_input[[]-False]",
        ),
    ),
    "disabled": Group("llama.cpp skips it, too", ("test_completion.py::test_cache_vs_nocache_prompt",)),
}


def group_of(name: str) -> str | None:
    """The group of a test that is about llama.cpp alone."""
    groups = (group for group, tests in LLAMA_SPECIFIC.items() if any(fnmatchcase(name, one) for one in tests.patterns))
    return next(groups, None)
