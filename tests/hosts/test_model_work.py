"""Figures of models read from their configs, against what their authors and their checkpoints say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evenflow.core.roofline import DEVICES, ModelWork
from evenflow.hosts.model_work import Precision, model_work, precision_of
from evenflow.hosts.prior import Prior, prior_of

H200 = DEVICES["H200"]
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QWEN3_30B_A3B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
QWEN3_NEXT_80B = {
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
DEEPSEEK_V3 = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GEMMA3_12B = {
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
}
GPT_OSS_20B = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "vocab_size": 201088,
}
HALF = Precision(2)


def work_of(config: dict[str, Any], num_ranks: int = 1, precision: Precision = HALF) -> ModelWork:
    return model_work(SimpleNamespace(**config), num_ranks, 2, precision, H200)


@pytest.mark.parametrize(
    ("config", "stored", "used"),  # billions of weights, without the embedding
    [
        (LLAMA_8B, 7.5, 7.5),
        (QWEN3_30B_A3B, 30.2, 3.0),
        (QWEN3_NEXT_80B, 79.4, 3.6),
        (DEEPSEEK_V3, 670.0, 36.6),
        (GEMMA3_12B, 11.8, 11.8),
        (GPT_OSS_20B, 20.3, 3.6),
    ],
)
def test_a_step_reads_all_experts_and_a_row_uses_a_few(config: dict[str, Any], stored: float, used: float) -> None:
    work = work_of(config)
    assert work.weight_bytes == pytest.approx(2e9 * stored, rel=0.01)
    assert work.row_flops == pytest.approx(2e9 * used, rel=0.04)


def test_linear_layers_cost_nothing_per_position_but_a_state_per_stream() -> None:
    work = work_of(QWEN3_NEXT_80B)
    assert work.cache_bytes == 12 * 2 * 2 * 2 * 256  # a quarter of the layers, two heads of keys and of values
    assert work.position_flops == 12 * 4 * 16 * 256
    assert work.stream_bytes == 36 * 2 * 4 * 32 * 128 * 128
    typed = dict(QWEN3_NEXT_80B, full_attention_interval=None)
    typed["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * 12
    assert work_of(typed) == work


def test_windows_cost_the_same_wherever_a_row_is() -> None:
    work = work_of(GPT_OSS_20B)
    assert work.cache_bytes == 12 * 2 * 2 * 8 * 64
    assert work.stream_bytes == 128 * work.cache_bytes
    assert work_of(GEMMA3_12B).cache_bytes == 8 * 2 * 2 * 8 * 256  # every sixth layer
    everywhere = dict(LLAMA_8B, sliding_window=4096)
    assert work_of(everywhere).cache_bytes == 0
    assert work_of(dict(everywhere, use_sliding_window=False)) == work_of(LLAMA_8B)


def test_latents_are_small_and_are_on_every_rank() -> None:
    of_one, of_eight = work_of(DEEPSEEK_V3), work_of(DEEPSEEK_V3, num_ranks=8)
    assert of_eight.cache_bytes == 61 * 2 * (512 + 64)
    assert of_one.cache_bytes > of_eight.cache_bytes  # 128 heads beside one latent multiply for longer than they read
    assert of_one.position_flops == 8 * of_eight.position_flops


def test_ranks_share_everything_else() -> None:
    of_one, of_two = work_of(LLAMA_8B), work_of(LLAMA_8B, num_ranks=2)
    assert of_two.weight_bytes == of_one.weight_bytes / 2
    assert of_two.cache_bytes == of_one.cache_bytes / 2
    assert work_of(LLAMA_8B, num_ranks=16).cache_bytes == of_one.cache_bytes / 8  # no rank has less than one head


@pytest.mark.parametrize(
    ("method", "settings", "found"),
    [
        (None, None, Precision(2)),
        ("fp8", None, Precision(1.0, is_fp8=True)),
        ("awq_marlin", {"bits": 4}, Precision(4.25 / 8)),
        ("gptq", {"bits": 8}, Precision(8.25 / 8)),
        ("gpt_oss_mxfp4", {}, Precision(4.25 / 8)),
        (
            "compressed-tensors",
            {"config_groups": {"group_0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}},
            Precision(1.0, is_fp8=True),
        ),
        (
            "compressed-tensors",
            {"config_groups": {"group_0": {"weights": {"num_bits": 4}, "input_activations": None}}},
            Precision(4.25 / 8),
        ),
    ],
)
def test_weights_of_fewer_bits(method: str | None, settings: dict[str, Any] | None, found: Precision) -> None:
    assert precision_of(2, method, settings) == found


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("compressed-tensors", {}),
        ("compressed-tensors", {"config_groups": ["odd"]}),
        ("awq", {"bits": "four"}),
        ("something_new", {}),
    ],
)
def test_nothing_is_estimated_of_unknown_quantization(method: str, settings: dict[str, Any]) -> None:
    found = prior_of(
        SimpleNamespace(**LLAMA_8B), "NVIDIA H200", 1, 2, quantization=method, quantization_config=settings
    )
    assert found == Prior()


def test_eight_bits_multiply_faster_where_the_device_can() -> None:
    def row(device: str, quantization: str | None) -> float:
        costs = prior_of(SimpleNamespace(**LLAMA_8B), device, 1, 2, quantization=quantization).costs
        assert costs is not None
        return costs.row

    assert row("NVIDIA H200", "fp8") < 0.7 * row("NVIDIA H200", None)
    assert row("NVIDIA A100-SXM4-80GB", "fp8") == row("NVIDIA A100-SXM4-80GB", None)


@pytest.mark.parametrize(
    "changed",
    [
        {"hybrid_override_pattern": "M-M*"},
        {"layer_types": ["mamba", "attention"] * 16},
        {"layer_types": ["full_attention"] * 31},
        {"layer_types": 7},
        {"num_experts": 8},  # of which a row uses an unknown number
        {"vocab_size": None},
        {"num_hidden_layers": "32"},
        {"num_attention_heads": 0},
        {"sliding_window": 4096.5},
        {"head_dim": -1},
        {"kv_lora_rank": 512},  # without the sizes of its heads
        {"linear_attn_config": {"kda_layers": [1]}},
    ],
)
def test_nothing_is_estimated_of_what_is_unknown(changed: dict[str, Any]) -> None:
    assert prior_of(SimpleNamespace(**(LLAMA_8B | changed)), "NVIDIA H200", 1, 2) == Prior()


def test_nothing_is_estimated_on_an_unknown_device() -> None:
    assert prior_of(SimpleNamespace(**LLAMA_8B), "cpu", 1, 2) == Prior()
    assert prior_of(SimpleNamespace(**LLAMA_8B), "NVIDIA H200", 1, 2).costs is not None
