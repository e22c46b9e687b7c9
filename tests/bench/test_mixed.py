"""The benchmark's load and arithmetic, without a model's speed."""

from __future__ import annotations

from collections import Counter

import pytest

from evenflow.bench.figures import Spread
from evenflow.bench.mixed import BATCH_SIZE, LONG_PROMPT, PolicyFigures, Verdict, mixed_load, run_load
from evenflow.engine.llm import LLM
from tests.cli.running import long_context_llama


def test_the_load_is_three_long_and_ten_short_prompts() -> None:
    assert LONG_PROMPT.startswith("Write a detailed essay about artificial intelligence artificial")
    assert Counter(prompt for prompt, _ in mixed_load()) == {LONG_PROMPT: 3, "Hello": 10}


@pytest.mark.parametrize("policy", ["alternate:32", "fixed:64", "unchunked"])
def test_a_run_counts_every_token_and_gap_once_and_decodes_feel_long_prefills(policy: str) -> None:
    with LLM(long_context_llama(), policy=policy, max_num_seqs=BATCH_SIZE, enable_prefix_caching=False) as llm:
        run = run_load(llm)
        num_prompt_tokens = sum(len(llm.tokenizer.encode(prompt)) for prompt, _ in mixed_load())
        assert llm.engine.stats.totals.prefill_tokens == num_prompt_tokens
    assert run.output_tokens == sum(max_tokens for _, max_tokens in mixed_load())
    assert len(run.gaps_with_prefill) + len(run.gaps_without) == run.output_tokens - len(mixed_load())
    assert len(run.gaps_with_prefill) >= 3 * (BATCH_SIZE - 2)
    assert run.gaps_without
    assert all(gap > 0 for gap in run.gaps_with_prefill + run.gaps_without)


def figures(policy: str, p99: float, total_s: float) -> PolicyFigures:
    gaps = Spread(count=10, p50=p99 / 2, p99=p99, max=p99)
    return PolicyFigures(policy, total_s, gaps, gaps, 1.0, (total_s,))


@pytest.mark.parametrize(
    ("p99", "total_s", "held"),
    [(0.1, 10.5, True), (0.1, 12.6, False), (0.1, 9.0, False), (0.6, 10.5, False)],
    ids=["as expected", "much longer", "shorter", "higher latency"],
)
def test_the_verdict_follows_the_figures(p99: float, total_s: float, held: bool) -> None:
    verdict = Verdict(figures("alternate:32", p99, total_s), figures("unchunked", 0.5, 10.0))
    assert verdict.held is held
    assert f") {'held' if held else 'did not hold'}. alternate:32 against unchunked" in verdict.line()
    assert f"{1000 * p99:.0f} ms against 500 ms" in verdict.line()
