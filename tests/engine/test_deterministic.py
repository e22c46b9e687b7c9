"""The engine in deterministic mode: policies, batches and reused prefixes change no bit of the logprobs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from evenflow import LLM, SamplingParams
from evenflow.engine.outputs import RequestOutput
from evenflow.native.build import library
from tests.engine.paged import tiny_block_bytes
from tests.model.cuda.devices import needs_cuda
from tests.models import tiny_llama

needs_kernels = pytest.mark.skipif(library() is None, reason="no native kernels")

PROMPTS = [[token, *range(token, token + length)] for token, length in ((5, 60), (90, 7), (200, 33), (300, 90))]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=3, prompt_logprobs=1)


def logprobs(output: RequestOutput) -> list[float]:
    assert output.logprobs is not None
    return [row.chosen.logprob for row in output.logprobs]


def prompt_logprobs(output: RequestOutput) -> list[float]:
    assert output.prompt_logprobs is not None
    return [row.chosen.logprob for row in output.prompt_logprobs]


PLACES = [
    *(pytest.param("cuda", weights, marks=needs_cuda) for weights in ("bfloat16", "float32")),
    pytest.param("cpu", "float32", marks=needs_kernels),
]


@pytest.mark.parametrize(("device", "weights"), PLACES)
def test_logprobs_do_not_depend_on_how_a_prompt_is_run(device: str, weights: str) -> None:
    settings: dict[str, Any] = {"device": device, "weights": weights, "deterministic": True}
    settings["kv_cache_memory"] = 64 << 20
    with LLM(tiny_llama(), policy="unchunked", enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([prompt], SAMPLING)[0] for prompt in PROMPTS]
    draw = random.Random(0)
    for policy in ("unchunked", "fixed:9", "fixed:33", "alternate:7", "target:2ms"):
        with LLM(tiny_llama(), policy=policy, **settings) as llm:
            for _ in range(5 if device == "cuda" else 2):
                order = draw.sample(range(len(PROMPTS)), len(PROMPTS))
                expected, prompts = [alone[place] for place in order], [PROMPTS[place] for place in order]
                for output, other in zip(llm.generate(prompts, SAMPLING), expected, strict=True):
                    assert prompt_logprobs(output) == prompt_logprobs(other), policy
                    assert logprobs(output) == logprobs(other), policy
                again = llm.generate(prompts, replace(SAMPLING, prompt_logprobs=None))  # their prefixes are there now
                for output, other in zip(again, expected, strict=True):
                    assert output.token_ids == other.token_ids, policy
                    assert logprobs(output) == logprobs(other), policy


@pytest.mark.parametrize(("device", "weights"), PLACES)
def test_logprobs_do_not_depend_on_preemptions_or_earlier_turns(device: str, weights: str) -> None:
    settings: dict[str, Any] = {"device": device, "weights": weights, "deterministic": True, "policy": "fixed:64"}
    sampling = replace(SAMPLING, prompt_logprobs=None, max_tokens=100)
    with LLM(tiny_llama(), kv_cache_memory=64 << 20, enable_prefix_caching=False, **settings) as llm:
        alone = [llm.generate([prompt], sampling)[0] for prompt in PROMPTS]
        turns = [[*prompt, *output.token_ids, 7] for prompt, output in zip(PROMPTS, alone, strict=True)]
        next_alone = [llm.generate([turn], sampling)[0] for turn in turns]
    # Blocks for about half of the tokens: with a prefix cache, a CPU stores them twice.
    block_bytes = tiny_block_bytes() // (2 if weights == "bfloat16" else 1) * (2 if device == "cpu" else 1)
    with LLM(tiny_llama(), kv_cache_memory=20 * block_bytes, **settings) as llm:
        for prompts, expected in ((PROMPTS, alone), (turns, next_alone)):
            for output, other in zip(llm.generate(prompts, sampling), expected, strict=True):
                assert logprobs(output) == logprobs(other)
        num_prompt_tokens = sum(map(len, PROMPTS)) + sum(map(len, turns))
        assert llm.engine.stats.totals.looked_up_tokens > num_prompt_tokens, "nobody was preempted"
