"""SmolLM2-135M, greedy: evenflow's tokens against transformers', and against its own whatever the chunks and batches.

Both sides run the same dequantised float32 weights, each through its own GGUF reader. Every token must be the likeliest
by the reference's logits after the tokens before it, or closer to that than 1e-3: a near tie, which the order of
floating-point sums decides.
"""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from evenflow import LLM, SamplingParams
from evenflow.engine.outputs import RequestOutput
from tests.models import VARIED_TEXTS, default_model_path

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
NEAR_TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LENGTHS = (10, 12, 15, 17, 20, 25, 31, 32, 33, 48, 64, 80, 100, 128, 150, 200, 300, 600, 1500, 3000)
SMALL_CHUNK_LIMIT = 300  # chunks of 1 and 7 tokens are tried on prompts up to this length: longer ones take minutes


@cache
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    path = default_model_path()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Prose, code, other scripts and chat, cut to the lengths above."""
    repository = Path(__file__).resolve().parents[2]
    sources = [
        (repository / "LICENSE").read_text(),
        inspect.getsource(json.decoder),
        inspect.getsource(textwrap),
        "\n".join(VARIED_TEXTS) * 3,
        "<|im_start|>user\nTell me about the history of bread, and how it is made today.<|im_end|>\n" * 8,
    ]
    with LLM("default") as llm:
        texts = [llm.tokenizer.encode(source) for source in sources]
    longest = max(texts, key=len)
    cut = []
    for number, length in enumerate(LENGTHS):
        text = texts[number % len(texts)]
        text = text if len(text) >= length + number else longest
        cut.append(tuple(text[number : number + length]))
        assert len(cut[-1]) == length
    return tuple(cut)


def check(outputs: list[RequestOutput], which: list[int]) -> None:
    for index, output in zip(which, outputs, strict=True):
        assert output.finish_reason == "length", output.error
        assert len(output.token_ids) == NUM_TOKENS
        judge(prompts()[index], tuple(output.token_ids))


@cache  # most runs give the same answers
def judge(prompt: tuple[int, ...], answer: tuple[int, ...]) -> None:
    with torch.inference_mode():
        logits = reference()(torch.tensor([prompt + answer[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
    gaps = logits.max(dim=-1).values - logits[range(NUM_TOKENS), answer]
    assert gaps.max() <= NEAR_TIE, f"prompt of {len(prompt)} tokens, token {gaps.argmax()}: a gap of {gaps.max():.2e}"


def short_prompts() -> list[int]:
    return [index for index, length in enumerate(LENGTHS) if length <= SMALL_CHUNK_LIMIT]


def all_prompts() -> list[int]:
    return list(range(len(LENGTHS)))


def run(which: list[int], **settings: Any) -> Iterator[tuple[LLM, list[RequestOutput]]]:
    with LLM("default", **settings) as llm:
        yield llm, llm.generate([prompts()[index] for index in which], GREEDY)


def test_alone_and_unchunked() -> None:
    for _, outputs in run(all_prompts(), policy="unchunked", max_num_seqs=1):
        check(outputs, all_prompts())


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_in_a_batch_of_eight_with_chunks_of(chunk: int) -> None:
    which = short_prompts() if chunk < 16 else all_prompts()
    for _, outputs in run(which, policy="fixed:2048", long_prefill_token_threshold=chunk, max_num_seqs=8):
        check(outputs, which)
        assert all(c.length <= chunk for output in outputs for c in output.chunks)


@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_alone_with_chunks_of(chunk: int) -> None:
    which = short_prompts()[:: 3 if chunk < 16 else 1]
    for _, outputs in run(which, policy=f"alternate:{chunk}", max_num_seqs=1):
        check(outputs, which)


def test_with_a_prefix_hit() -> None:
    which = [index for index in all_prompts() if LENGTHS[index] > 16]
    for llm, outputs in run(which, policy="fixed:256", max_num_seqs=8):
        check(outputs, which)
        again = llm.generate([prompts()[index] for index in which], GREEDY)
        assert all(output.num_cached_tokens >= 16 for output in again)
        check(again, which)


def test_after_a_forced_preemption() -> None:
    which = [index for index in all_prompts() if 31 <= LENGTHS[index] <= 300]
    tokens_of_kv = 800
    settings = {"enable_prefix_caching": False, "kv_cache_memory": tokens_of_kv * 30 * 2 * 3 * 64 * 4}
    for llm, outputs in run(which, policy="fixed:64", max_num_seqs=8, **settings):
        check(outputs, which)
        admitted = llm.engine.stats.totals.looked_up_tokens
        assert admitted > sum(LENGTHS[index] for index in which), "nobody was preempted"


def test_two_steps_in_flight() -> None:
    which = short_prompts()
    for _, outputs in run(which, policy="fixed:64", max_num_seqs=8, max_steps_in_flight=2):
        check(outputs, which)


def test_the_weights_are_those_that_transformers_reads() -> None:
    from evenflow.model.loader import load_model

    ours = load_model("default").weights
    theirs = reference().state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[f"model.{name}" if name != "lm_head.weight" else name]), name
