"""logit_bias, allowed_token_ids and bad_words: the sampler against distributions computed by hand, and real models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from evenflow import LLM, SamplingParams
from evenflow.core.grammar import Grammar
from evenflow.errors import InvalidRequest
from evenflow.model.sampler import SampledSequence, Samples, sample
from evenflow.model.token_rules import TokenRules
from tests.model.test_sampler import LOGITS, assert_frequencies
from tests.models import reference_model, tiny_llama

DRAWS = 4000
PROMPT = [5, 17, 200, 33, 8]


def sampled(tokens: list[int], num_prompt_tokens: int = 1, draws: int = 1, **params: Any) -> Samples:
    stops = frozenset(params.pop("stop", ()))
    sampling = SamplingParams(**{"temperature": 1.0, **params})
    rules = TokenRules.of(sampling, len(LOGITS))
    rows = [SampledSequence(sampling, seed, tokens, num_prompt_tokens, stops, None, rules) for seed in range(draws)]
    return sample(LOGITS.repeat(draws, 1), rows)


def frequencies(tokens: list[int], **params: Any) -> Tensor:
    found = torch.tensor(sampled(tokens, draws=DRAWS, **params).tokens)
    return torch.bincount(found, minlength=len(LOGITS)) / DRAWS


def without(*token_ids: int) -> Tensor:
    logits = LOGITS.clone()
    logits[list(token_ids)] = -math.inf
    return logits


def test_a_request_without_rules_has_none() -> None:
    assert TokenRules.of(SamplingParams(), 6) is None
    assert TokenRules.of(SamplingParams(logit_bias={}), 6) is None
    assert TokenRules.of(SamplingParams(allowed_token_ids=(1,)), 6) is not None


def test_biases_are_added_to_the_logits() -> None:
    biased = LOGITS + torch.tensor([-1.0, 0, 0, 2.0, 0, 0])
    assert_frequencies(frequencies([0], logit_bias={0: -1.0, 3: 2.0}), biased.softmax(-1))
    assert sampled([0], temperature=0, logit_bias={3: 2.9}).tokens == [0]
    assert sampled([0], temperature=0, logit_bias={3: 3.1}).tokens == [3]
    assert sampled([0], temperature=0, logit_bias={0: -100, 1: -100}).tokens == [4]


def test_a_bias_comes_before_penalties_and_truncation() -> None:
    logits = LOGITS + torch.tensor([0, 0, 0, 0, 0, 6.0])
    logits[0] /= 2  # the repetition penalty of token 0, which is positive
    kept = torch.where(logits >= logits.topk(2).values[-1], logits, -math.inf)
    found = frequencies([0], logit_bias={5: 6.0}, repetition_penalty=2.0, top_k=2)
    assert_frequencies(found, kept.softmax(-1))


def test_only_allowed_tokens_come() -> None:
    assert_frequencies(frequencies([0], allowed_token_ids=(2, 4, 5)), without(0, 1, 3).softmax(-1))
    assert sampled([0], temperature=0, allowed_token_ids=[5, 3]).tokens == [3]


def test_a_bias_cannot_bring_back_a_forbidden_token() -> None:
    assert sampled([0], temperature=0, allowed_token_ids=[5, 3], logit_bias={0: 100, 5: 50}).tokens == [5]


def test_a_bad_word_is_not_completed() -> None:
    bad = ((0,), (4, 1), (4, 4, 2))
    assert_frequencies(frequencies([3], bad_word_ids=bad), without(0).softmax(-1))
    assert_frequencies(frequencies([3, 4], bad_word_ids=bad), without(0, 1).softmax(-1))
    assert_frequencies(frequencies([3, 4, 4], bad_word_ids=bad), without(0, 1, 2).softmax(-1))


def test_the_prompt_does_not_begin_a_bad_word() -> None:
    bad = ((4, 4, 0),)
    assert sampled([4, 4], 2, temperature=0, bad_word_ids=bad).tokens == [0]
    assert sampled([4, 4], 1, temperature=0, bad_word_ids=bad).tokens == [0]
    assert sampled([3, 4, 4], 1, temperature=0, bad_word_ids=bad).tokens == [1]


def test_min_tokens_holds_beside_rules_and_gives_way_if_only_an_end_is_allowed() -> None:
    options: dict[str, Any] = {"temperature": 0, "min_tokens": 3, "stop": [0, 1]}
    assert sampled([5], logit_bias={2: 1.0}, **options).tokens == [2]
    assert sampled([5], allowed_token_ids=[0, 3], **options).tokens == [3]
    assert sampled([5], allowed_token_ids=[0], **options).tokens == [0]


def test_rules_that_leave_no_token_fail_the_request_alone() -> None:
    found = sampled([5], allowed_token_ids=[2], bad_word_ids=[(2,)])
    assert "leave no token" in found.errors[0]


def test_logprobs_are_the_models_own() -> None:
    found = sampled([5], temperature=0, logprobs=2, logit_bias={3: 50.0}, bad_word_ids=[(0,)])
    assert found.tokens == [3]
    expected = LOGITS.log_softmax(-1)
    assert found.logprobs[0][0].chosen.logprob == pytest.approx(float(expected[3]))
    assert [token.token_id for token in found.logprobs[0][0].top] == [0, 1]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {0: 101.0}}, r"logit_bias\[0\]=101.0 but expected a number in"),
        ({"logit_bias": {0: math.nan}}, "logit_bias"),
        ({"logit_bias": {"0": 1.0}}, "logit_bias's token id='0'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias's token id=-1"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 entries in logit_bias but expected at most 1024"),
        ({"allowed_token_ids": []}, "at least one token id"),
        ({"allowed_token_ids": range(65537)}, "65537 entries"),
        ({"allowed_token_ids": [2**70, -1]}, "allowed_token_ids=-1"),
        ({"bad_words": ["a", ""]}, "'' in bad_words"),
        ({"bad_words": [5]}, "'5' in bad_words"),
        ({"bad_words": ["a"] * 257}, "257 entries in bad_words"),
        ({"bad_word_ids": [[]]}, "empty list in bad_word_ids"),
        ({"bad_word_ids": [[-1]]}, "bad_word_ids=-1"),
    ],
)
def test_wrong_rules_are_refused_with_their_value(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        SamplingParams(**params)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(tiny_llama()), kv_cache_memory=64 << 20, threads=1) as model:
        yield model


def answer(llm: LLM, **params: Any) -> Any:
    [found] = llm.generate([PROMPT], SamplingParams(**{"max_tokens": 8, "temperature": 0, **params}))
    assert found.error is None, found.error
    return found


def reference_tokens(length: int, change: Any) -> list[int]:
    """The greedy continuation by transformers, with `change` made to each step's logits."""
    model, tokens = reference_model("LlamaForCausalLM"), list(PROMPT)
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        change(logits, tokens[len(PROMPT) :])
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


def test_a_real_model_follows_biases_as_transformers_would(llm: LLM) -> None:
    plain = answer(llm, ignore_eos=True).token_ids
    biases = {plain[0]: -100.0, plain[3]: -2.5, 77: 3.0}

    def change(logits: Tensor, output: list[int]) -> None:
        for token_id, bias in biases.items():
            logits[token_id] += bias

    found = answer(llm, ignore_eos=True, logit_bias=biases).token_ids
    assert found == reference_tokens(8, change)
    assert found != plain


def test_a_real_model_avoids_sequences_as_transformers_would(llm: LLM) -> None:
    plain = answer(llm, ignore_eos=True).token_ids
    bad = [tuple(plain[2:4]), (plain[5],)]

    def change(logits: Tensor, output: list[int]) -> None:
        for word in bad:
            if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]:
                logits[word[-1]] = -math.inf

    found = answer(llm, ignore_eos=True, bad_word_ids=bad).token_ids
    assert found == reference_tokens(8, change)
    assert found != plain


def test_bad_words_are_found_at_the_start_and_after_a_space(llm: LLM) -> None:
    encode = llm.tokenizer.encode_inside
    prepared = llm.prepare(PROMPT, SamplingParams(bad_words=["the", " then"]))
    words = [encode("the"), encode(" the"), encode("then"), encode(" then")]
    assert prepared.sampling.bad_word_ids == tuple(map(tuple, words))
    the = encode(" the")
    assert len(the) == 1
    only_the = answer(llm, allowed_token_ids=[*the, 300], max_tokens=4, temperature=1.0, bad_words=["the"])
    assert only_the.token_ids == [300] * 4


def test_rules_and_a_grammar_hold_together(llm: LLM) -> None:
    digits = {digit: llm.tokenizer.encode_inside(digit)[0] for digit in "0123456789"}
    grammar = Grammar.regex("[0-9]{6}")
    for temperature in (0.0, 1.0):
        found = answer(
            llm, grammar=grammar, temperature=temperature, allowed_token_ids=[*digits.values(), 2], bad_words=["1", "2"]
        )
        assert len(found.text) == 6
        assert set(found.text) <= set("03456789")
    forced = answer(llm, grammar=grammar, allowed_token_ids=[*digits.values(), 2], logit_bias={digits["7"]: 100})
    assert forced.text == "777777"


def test_rules_against_a_grammar_end_only_that_request(llm: LLM) -> None:
    impossible = SamplingParams(grammar=Grammar.choice(["yes"]), allowed_token_ids=[300], max_tokens=4)
    plain = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    failed, other = llm.generate([PROMPT, PROMPT], [impossible, plain])
    assert "leave no token" in (failed.error or "")
    assert len(other.token_ids) == 4


def test_ids_outside_the_vocabulary_are_refused(llm: LLM) -> None:
    for params in ({"logit_bias": {512: 1.0}}, {"allowed_token_ids": [512]}, {"bad_word_ids": [[5, 512]]}):
        with pytest.raises(InvalidRequest, match="token id 512"):
            llm.prepare(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]


def test_all_prompt_logprobs_are_the_models_distribution(llm: LLM) -> None:
    rows = answer(llm, prompt_logprobs=-1, max_tokens=1).prompt_logprobs
    with torch.no_grad():
        expected = reference_model("LlamaForCausalLM")(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    assert len(rows) == len(PROMPT) - 1
    for row, wanted in zip(rows, expected, strict=False):
        found = {token.token_id: token.logprob for token in row.top}
        assert sorted(found) == list(range(512))
        torch.testing.assert_close(
            torch.tensor([found[token_id] for token_id in range(512)]), wanted, atol=1e-4, rtol=1e-4
        )
