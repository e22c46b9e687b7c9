"""The whole engine on real weights: against the one-file oracle, and against a published text."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenflow import LLM, AsyncLLM, SamplingParams
from evenflow.errors import InvalidConfig, InvalidRequest
from evenflow.minimal import batch_generate
from evenflow.model.loader import load_model
from tests.models import reference_model, stories260k_folder, tiny_llama
from tests.shared_data import shared_path

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@cache
def oracle() -> tuple[Any, Any]:
    return reference_model("LlamaForCausalLM").requires_grad_(False), _Ids()


class _Ids:
    """Token ids are given as they are, and nothing but the length ends an answer."""

    eos_token_id = None

    def encode(self, text: str) -> list[int]:
        raise AssertionError("prompts are given as ids")

    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


POLICIES = st.one_of(
    st.integers(1, 40).map(lambda size: f"fixed:{size}"),
    st.integers(1, 40).map(lambda size: f"alternate:{size}"),
    st.sampled_from(["unchunked", "load", "adaptive", "prompt-length"]),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=60), min_size=1, max_size=5),
    policy=POLICIES,
    batch_size=st.integers(1, 4),
    depth=st.sampled_from((1, 2)),
    prefill_step=st.integers(1, 70),
)
def test_the_engine_gives_the_oracles_tokens(
    prompts: list[list[int]], policy: str, batch_size: int, depth: int, prefill_step: int
) -> None:
    model, tokenizer = oracle()
    expected = [
        batch_generate(
            model, tokenizer, [prompt], batch_size=1, prefill_step=prefill_step, max_seq_len=len(prompt) + 8
        )[0].token_ids
        for prompt in prompts
    ]
    with LLM(tiny_llama(), policy=policy, max_num_seqs=batch_size, max_steps_in_flight=depth) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [output.token_ids for output in outputs] == expected


def test_the_published_text_of_stories260k_is_reproduced(tmp_path: Path) -> None:
    golden = shared_path("models/stories260K/golden.txt").read_text().rstrip("\n")
    for policy in ("unchunked", "fixed:16"):
        with LLM(stories260k_folder(tmp_path / policy), policy=policy) as llm:
            [output] = llm.generate([[1]], SamplingParams(temperature=0.0, max_tokens=200))
        assert output.text.startswith(golden)


def test_sampling_with_a_seed_does_not_depend_on_batch_or_chunks() -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=7, max_tokens=12, ignore_eos=True)
    prompts = [[token, *range(40)] for token in range(100, 104)]
    with LLM(tiny_llama(), policy="unchunked", max_num_seqs=1) as llm:
        alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in prompts]
    with LLM(tiny_llama(), policy="fixed:7") as llm:
        together = [output.token_ids for output in llm.generate(prompts, sampling)]
    assert alone == together
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_prompt_logprobs_are_the_same_in_chunks() -> None:
    prompt = list(range(50, 90))
    sampling = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3, logprobs=2)
    rows = []
    for policy in ("unchunked", "fixed:9"):
        with LLM(tiny_llama(), policy=policy) as llm:
            [output] = llm.generate([prompt], sampling)
        assert output.prompt_logprobs is not None
        assert [row.chosen.token_id for row in output.prompt_logprobs] == prompt[1:]
        assert output.logprobs is not None
        assert [row.chosen.token_id for row in output.logprobs] == output.token_ids
        assert output.outputs[0].cumulative_logprob == sum(row.chosen.logprob for row in output.logprobs)
        rows.append([row.chosen.logprob for row in output.prompt_logprobs])
    assert rows[0] == pytest.approx(rows[1], abs=1e-4)


def test_a_forced_preemption_changes_nothing() -> None:
    prompts = [[token] * 60 for token in (5, 6, 7)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(tiny_llama(), enable_prefix_caching=False) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, sampling)]
    model = load_model(tiny_llama()).config
    block_bytes = 16 * 2 * 4 * model.num_layers * model.num_kv_heads * model.head_dim
    with LLM(tiny_llama(), enable_prefix_caching=False, kv_cache_memory=17 * block_bytes) as llm:
        assert [output.token_ids for output in llm.generate(prompts, sampling)] == expected
        assert llm.engine.stats.totals.looked_up_tokens > 3 * 60  # somebody was admitted twice


def test_stream_yields_the_text_piece_by_piece_and_can_be_left() -> None:
    with LLM(tiny_llama()) as llm:
        deltas = list(llm.stream("Hello there", GREEDY))
        [whole] = llm.generate("Hello there", GREEDY)
        assert "".join(delta.text for delta in deltas) == whole.text
        assert [delta.finish_reason for delta in deltas] == [None] * 7 + ["length"]
        stream = llm.stream("Hello there", GREEDY)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert llm.abort("of nobody") is None  # it comes after what closing asked for
        assert not llm.engine.has_work


def test_chat_uses_the_models_template() -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    with LLM(tiny_llama()) as llm:
        [one] = llm.chat(conversation, GREEDY)
        [same, _] = llm.chat([conversation, conversation], GREEDY)
        assert one.token_ids == same.token_ids
        text = llm.tokenizer.decode(one.prompt_token_ids, skip_special_tokens=False)
        assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        with pytest.raises(InvalidRequest, match="at least one message"):
            llm.chat([[]])


def test_async_chat_uses_it_too() -> None:
    import asyncio

    async def ask() -> list[list[int]]:
        async with AsyncLLM(tiny_llama()) as llm:
            output = await llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
            with pytest.raises(InvalidRequest, match="Got 'hi' as a conversation"):
                await llm.chat("hi")  # type: ignore[arg-type]
            return [output.token_ids, (await llm.generate(output.prompt_token_ids, GREEDY)).token_ids]

    through_chat, as_tokens = asyncio.run(ask())
    assert through_chat == as_tokens


def test_async_streams_on_a_real_model() -> None:
    import asyncio

    async def main() -> list[list[int]]:
        async with AsyncLLM(tiny_llama(), policy="fixed:16") as llm:
            calls = [llm.generate([number] * 30, GREEDY) for number in range(4)]
            return [output.token_ids for output in await asyncio.gather(*calls)]

    with LLM(tiny_llama()) as llm:
        expected = [output.token_ids for output in llm.generate([[number] * 30 for number in range(4)], GREEDY)]
    assert asyncio.run(main()) == expected


def test_bad_requests_are_refused_and_the_engine_goes_on() -> None:
    with LLM(tiny_llama()) as llm:
        for prompt in ([], [512], [1] * 256):
            with pytest.raises(ValueError, match="Got"):
                llm.generate([prompt], GREEDY)
        with pytest.raises(ValueError, match="2 sampling params for 1"):
            llm.generate([[1]], [GREEDY, GREEDY])
        assert llm.generate([[1]], GREEDY)[0].finish_reason == "length"


def test_a_context_longer_than_the_models_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="max_model_len=9999"):
        LLM(tiny_llama(), max_model_len=9999)
    with pytest.raises(InvalidConfig, match="KV cache holds"):
        LLM(tiny_llama(), max_model_len=200, kv_cache_memory=200_000)


def test_what_was_decided_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenflow")
    with LLM(tiny_llama(), max_num_batched_tokens=77):
        assert "Chunked prefill is enabled with max_num_batched_tokens=77." in caplog.messages
    with LLM(tiny_llama(), enable_chunked_prefill=False):
        assert "Chunked prefill is disabled" in caplog.messages[-1]
