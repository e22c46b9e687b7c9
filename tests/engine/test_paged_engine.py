"""The whole engine on the executor for GPUs, run on the CPU, against the CPU's own: the same answers."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from evenflow import LLM, SamplingParams
from evenflow.core.grammar import Grammar
from tests.engine.paged import paged_llm, tiny_block_bytes
from tests.models import tiny_llama

PROMPTS = [[token, *range(token, token + length)] for token, length in ((5, 60), (90, 7), (200, 33), (300, 90))]
DIGITS = Grammar.regex(r"([0-9]{3},){14}[0-9]")
ROWS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=20, ignore_eos=True),
    "penalised": SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, seed=3, max_tokens=20),
    "ruled": SamplingParams(
        temperature=1.0, seed=1, max_tokens=20, min_tokens=9, logit_bias={40: 3.0}, bad_word_ids=((40, 41), (42,))
    ),
    "constrained": SamplingParams(temperature=1.0, seed=5, max_tokens=80, grammar=DIGITS),
    "logprobs": SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, prompt_logprobs=2),
}


def answers(llm: LLM, sampling: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, sampling)]


@cache
def expected(name: str) -> list[list[int]]:
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        return answers(llm, ROWS[name])


@pytest.mark.parametrize("policy", ["unchunked", "fixed:9"])
def test_every_kind_of_request_gets_the_cpus_tokens(policy: str) -> None:
    with paged_llm(tiny_llama(), policy=policy) as llm:
        for name, sampling in ROWS.items():
            assert answers(llm, sampling) == expected(name), name


def test_all_kinds_run_beside_each_other() -> None:
    kinds = ["greedy", "constrained", "penalised", "sampled"]
    with paged_llm(tiny_llama(), policy="fixed:16") as llm:
        found = answers(llm, [ROWS[name] for name in kinds])
    assert found == [expected(name)[place] for place, name in enumerate(kinds)]


@pytest.mark.parametrize("name", ["greedy", pytest.param("penalised", marks=pytest.mark.slow), "constrained"])
def test_a_preemption_changes_nothing(name: str) -> None:
    sampling = replace(ROWS[name], max_tokens=60, min_tokens=0 if name == "constrained" else 60)
    prompts, memory = [[token] * 60 for token in (5, 6, 7)], 17 * tiny_block_bytes()
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    with paged_llm(tiny_llama(), enable_prefix_caching=False, policy="fixed:64", kv_cache_memory=memory) as llm:
        assert [output.token_ids for output in llm.generate(prompts, sampling)] == alone
        assert llm.engine.stats.totals.looked_up_tokens > 3 * 60  # somebody was admitted twice


def test_a_prompt_that_was_computed_is_not_computed_again() -> None:
    longer = [*PROMPTS[0], *range(100, 120)]
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        [alone] = llm.generate([longer], ROWS["greedy"])
    with paged_llm(tiny_llama(), policy="fixed:32") as llm:
        llm.generate([PROMPTS[0]], ROWS["greedy"])
        [output] = llm.generate([longer], ROWS["greedy"])
    assert output.num_cached_tokens == len(PROMPTS[0]) // 16 * 16
    assert output.token_ids == alone.token_ids


def test_logprobs_are_the_cpus() -> None:
    with LLM(tiny_llama(), device="cpu", policy="unchunked") as llm:
        alone = llm.generate(PROMPTS, ROWS["logprobs"])
    with paged_llm(tiny_llama(), policy="fixed:21") as llm:
        outputs = llm.generate(PROMPTS, ROWS["logprobs"])
    for output, other in zip(outputs, alone, strict=True):
        for rows, others in ((output.logprobs, other.logprobs), (output.prompt_logprobs, other.prompt_logprobs)):
            assert rows is not None
            assert others is not None
            assert [row.chosen.token_id for row in rows] == [row.chosen.token_id for row in others]
            assert [len(row.top) for row in rows] == [len(row.top) for row in others]
            assert [row.chosen.logprob for row in rows] == pytest.approx(
                [row.chosen.logprob for row in others], abs=1e-4
            )


def test_a_grammar_holds_with_steps_in_flight() -> None:
    with paged_llm(tiny_llama(), policy="fixed:16") as llm:
        for output in llm.generate(PROMPTS, ROWS["constrained"]):
            assert re.fullmatch(r"([0-9]{3},){14}[0-9]", output.text)


def test_a_target_is_the_default_here_too() -> None:
    with paged_llm(tiny_llama(), max_model_len=200, max_num_seqs=2) as llm:
        assert llm.policy.startswith("target:")
        assert answers(llm, ROWS["greedy"]) == expected("greedy")
