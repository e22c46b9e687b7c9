"""A hybrid model with prefix caching in a real vLLM: conversations find as many cached tokens as without a target."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.models import byte_level_tokenizer, save_tokenizer
from tests.vllm.fronts import Front, needs_vllm, prompt_of

pytestmark = [pytest.mark.vllm, needs_vllm]

_TINY = {  # in the shape of Qwen3-Next
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 60_000,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "vocab_size": 1024,
    "torch_dtype": "bfloat16",
}
_TURNS, _CONVERSATIONS, _ANSWER = 5, 3, 12


def hit_tokens(front: Front, first_token: int) -> float:
    """Of conversations beside each other, whose turns also begin beside a prompt that nobody asks again."""

    def turn(history: list[int]) -> list[int]:
        answer = front.openai.completions.create(
            model="tiny",
            prompt=history,
            max_tokens=_ANSWER,
            extra_body={"ignore_eos": True, "temperature": 0, "return_token_ids": True},
        )
        return history + answer.choices[0].token_ids + prompt_of(150, first_token)

    before = front.figure("vllm:prefix_cache_hits_total")
    histories = [prompt_of(700 + 300 * number, first_token + number) for number in range(_CONVERSATIONS)]
    with ThreadPoolExecutor(_CONVERSATIONS + 1) as pool:
        for number in range(_TURNS):
            cold = pool.submit(front.complete, 2000, 1, first_token + 20 + number)
            histories = list(pool.map(turn, histories))
            cold.result()
    return front.figure("vllm:prefix_cache_hits_total") - before


def test_conversations_hit_as_many_tokens_as_without_a_target(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(_TINY))
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    flags = ("--load-format", "dummy", "--dtype", "bfloat16", "--enable-prefix-caching")
    with closing(Front(tmp_path, policy="target:50ms", vllm_flags=flags)) as front:
        steered = hit_tokens(front, 100)
        front.set_target(None)
        assert steered >= hit_tokens(front, 200) > 0
