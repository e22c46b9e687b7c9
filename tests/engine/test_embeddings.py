"""Embeddings of the engine against transformers' hidden states, whatever the chunks, prefix hits and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch

from evenflow import LLM, SamplingParams
from evenflow.core.request import Pooling
from evenflow.errors import InvalidRequest
from tests.engine.paged import paged_llm
from tests.models import ARCHITECTURES, reference_model, tiny_hf_folder, tiny_llama

PROMPTS = [[1, *range(5, 85)], [7], [1, 300, 20, 30]]


def expected(architecture: str, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        rows = reference_model(architecture).model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = rows[-1] if pooling == "last" else rows.mean(0)
    return pooled / pooled.norm()


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("policy", ["fixed:9", "unchunked"])
@pytest.mark.parametrize("new_llm", [LLM, paged_llm])
def test_embeddings_are_those_of_transformers(new_llm: Callable[..., LLM], policy: str, pooling: Pooling) -> None:
    with new_llm(str(tiny_llama()), policy=policy, threads=1, kv_cache_memory=1 << 22) as llm:
        for again in (False, True):  # the second time, a prefix may be cached
            for prompt, output in zip(PROMPTS, llm.embed(PROMPTS, pooling), strict=True):
                torch.testing.assert_close(
                    torch.tensor(output.embedding), expected("LlamaForCausalLM", prompt, pooling), rtol=0, atol=1e-5
                )
                is_long = len(prompt) > 80
                assert bool(output.num_cached_tokens) is (again and is_long and pooling == "last")
                assert (len(output.chunks) > 1) is (is_long and policy == "fixed:9" and not output.num_cached_tokens)


@pytest.mark.parametrize("architecture", ARCHITECTURES[1:])
def test_every_architecture_has_embeddings(architecture: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tiny_hf_folder(tmp_path_factory.mktemp("model"), architecture)
    with LLM(str(folder), policy="fixed:30", threads=1, kv_cache_memory=1 << 22) as llm:
        [output] = llm.embed(PROMPTS[0], "mean")
    torch.testing.assert_close(
        torch.tensor(output.embedding), expected(architecture, PROMPTS[0], "mean"), rtol=0, atol=1e-5
    )


def test_embeddings_and_texts_share_steps() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    embed = SamplingParams(temperature=0.0, max_tokens=1, pooling="mean")
    with LLM(str(tiny_llama()), policy="fixed:16", threads=1, kv_cache_memory=1 << 22) as llm:
        [alone] = llm.generate([PROMPTS[2]], greedy)
        text, vector = llm.generate([PROMPTS[2], PROMPTS[0]], [greedy, embed])
    assert text.token_ids == alone.token_ids
    assert (text.embedding, len(vector.embedding or ())) == (None, 64)
    wanted = expected("LlamaForCausalLM", PROMPTS[0], "mean")
    torch.testing.assert_close(torch.tensor(vector.embedding), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("new_llm", [LLM, paged_llm])
def test_prompt_logprobs_change_no_embedding(new_llm: Callable[..., LLM], pooling: Pooling) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, pooling=pooling, prompt_logprobs=1)
    with new_llm(str(tiny_llama()), policy="fixed:30", threads=1, kv_cache_memory=1 << 22) as llm:
        [output] = llm.generate([PROMPTS[0]], sampling)
    assert len(output.prompt_logprobs or ()) == len(PROMPTS[0]) - 1
    wanted = expected("LlamaForCausalLM", PROMPTS[0], pooling)
    torch.testing.assert_close(torch.tensor(output.embedding), wanted, rtol=0, atol=1e-5)


def test_what_cannot_be_pooled_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="Got pooling='cls' but expected 'last' or 'mean'"):
        SamplingParams(max_tokens=1, pooling="cls")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="max_tokens=16 but expected max_tokens=1"):
        SamplingParams(pooling="last")
