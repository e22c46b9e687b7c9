"""Sampling: exact where it is deterministic, by frequency with fixed seeds where it is not."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from evenflow.core.request import SamplingParams
from evenflow.errors import InvalidRequest
from evenflow.model.sampler import SampledSequence, sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])


def sequence(tokens: list[int] | None = None, num_prompt_tokens: int = 1, seed: int = 0, **params: Any) -> Any:
    stop = frozenset(params.pop("stop", ()))
    return SampledSequence(
        SamplingParams(**{"temperature": 1.0, **params}), seed, tokens or [0], num_prompt_tokens, stop
    )


def frequencies(logits: Tensor, draws: int = 4000, **params: Any) -> Tensor:
    """How often each token was sampled, with a new seed each time."""
    rows = [sequence(seed=seed, **params) for seed in range(draws)]
    counts = Counter(sample(logits.repeat(draws, 1), rows).tokens)
    return torch.tensor([counts[token] / draws for token in range(len(logits))])


def assert_frequencies(found: Tensor, expected: Tensor, draws: int = 4000) -> None:
    """Within four standard deviations; never a token of probability 0."""
    assert found[expected == 0].sum() == 0
    deviation = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 4 * deviation + 1e-9).all(), (found, expected)


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    rows = [sequence(seed=seed, temperature=0.0) for seed in range(5)]
    assert sample(LOGITS.roll(2).repeat(5, 1), rows).tokens == [2] * 5


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_tokens_come_as_often_as_their_probability(temperature: float) -> None:
    assert_frequencies(frequencies(LOGITS, temperature=temperature), (LOGITS / temperature).softmax(-1))


def test_top_k_keeps_the_k_likeliest() -> None:
    expected = torch.where(LOGITS >= 0.5, LOGITS, -math.inf).softmax(-1)
    assert_frequencies(frequencies(LOGITS, top_k=3), expected)


def test_top_p_keeps_the_token_that_reaches_p() -> None:
    probabilities = LOGITS.softmax(-1)  # 0.55, 0.20, 0.12 (token 4), 0.07, ...
    assert probabilities[0] < 0.7 < probabilities[[0, 1]].sum()
    expected = torch.where(LOGITS >= 1.0, LOGITS, -math.inf).softmax(-1)
    assert_frequencies(frequencies(LOGITS, top_p=0.7), expected)


def test_top_p_over_a_flat_vocabulary_looks_beyond_the_first_candidates() -> None:
    logits = torch.linspace(0.0, 0.01, 5000)
    draws = 2000
    rows = [sequence(seed=seed, top_p=0.5) for seed in range(draws)]
    tokens = sample(logits.repeat(draws, 1), rows).tokens
    sums = logits.flip(0).softmax(-1).cumsum(-1)
    lowest_kept = 5000 - 1 - int((sums < 0.5).sum())
    assert min(tokens) >= lowest_kept
    assert min(tokens) < lowest_kept + 50


def test_min_p_is_relative_to_the_likeliest() -> None:
    relative = LOGITS - LOGITS.max()
    expected = torch.where(relative >= math.log(0.2), LOGITS, -math.inf).softmax(-1)
    assert_frequencies(frequencies(LOGITS, min_p=0.2), expected)


@pytest.mark.parametrize("temperature", [1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    rows = [sequence(seed=seed, temperature=temperature, top_p=0.9) for seed in range(20)]
    assert sample((LOGITS * 1000).repeat(20, 1), rows).tokens == [0] * 20


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("repetition_penalty", value) for value in (0.0, 1e-45, 1e-39, 0.0099, 101.0, 1e39, math.nan, math.inf)),
        *(("temperature", value) for value in (-1e-9, 101.0, 1e39, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.1, math.nan)),
        *(("min_p", value) for value in (-0.1, 1.1)),
    ],
)
def test_numbers_that_the_sampler_cannot_use_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"Got {name}=.* but expected a number"):
        SamplingParams(**{name: value})


def test_whole_numbers_that_no_float_holds_are_refused() -> None:
    for name in ("temperature", "min_p", "repetition_penalty", "presence_penalty"):
        with pytest.raises(InvalidRequest, match="but expected a number"):
            SamplingParams(**{name: 10**400})


def test_nothing_left_to_draw_is_still_a_token_of_the_vocabulary() -> None:
    [token] = sample(LOGITS.repeat(1, 1), [sequence(stop=range(6), min_tokens=3)]).tokens
    assert 0 <= token < len(LOGITS)


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros(1, 5000)
    alone = [sample(logits.clone(), [sequence([0] * n, seed=seed)]).tokens[0] for seed, n in [(1, 5), (2, 5), (1, 6)]]
    assert len(set(alone)) == 3
    rows = [
        sequence([9] * 6, seed=1),
        sequence(temperature=0.0),
        sequence([9] * 5, seed=2),
        sequence([8] * 5, num_prompt_tokens=3, seed=1),
    ]
    together = sample(logits.repeat(4, 1), rows).tokens
    assert [together[3], together[2], together[0]] == alone


def test_seeds_of_63_bits_are_told_apart() -> None:
    rows = [sequence(seed=seed) for seed in (0, 1, 2**62, 2**63 - 1)]
    assert len(set(sample(torch.zeros(4, 5000), rows).tokens)) == 4


def test_penalties_follow_their_formulas() -> None:
    tokens = [0, 1, 1, 4, 4, 4]  # prompt: 0, 1; output: 1, 4, 4, 4
    params: dict[str, Any] = {
        "temperature": 0.0,
        "repetition_penalty": 2.0,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
    }
    logits = LOGITS.clone().unsqueeze(0)
    logits[0, 4] = -0.5
    expected = logits[0].tolist()
    expected[0] = 2.0 / 2.0
    expected[1] = 1.0 / 2.0 - 0.25 - 0.5 * 1
    expected[4] = -0.5 * 2.0 - 0.25 - 0.5 * 3
    sample(logits, [sequence(tokens, num_prompt_tokens=2, **params)])  # penalties are applied in place
    torch.testing.assert_close(logits[0], torch.tensor(expected))


def test_stop_tokens_wait_for_min_tokens() -> None:
    params: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "max_tokens": 4, "stop": (0,)}
    tokens = [
        sample(LOGITS.clone().unsqueeze(0), [sequence([5] * (3 + n), num_prompt_tokens=3, **params)]).tokens[0]
        for n in range(4)
    ]
    assert tokens == [1, 1, 0, 0]


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = sequence(temperature=0.0, logprobs=2, repetition_penalty=100.0)  # token 0 stands in the prompt
    samples = sample(LOGITS.clone().unsqueeze(0), [row])
    raw = LOGITS.log_softmax(-1)
    assert samples.tokens == [1]
    assert samples.logprobs[0][0].chosen == (1, pytest.approx(float(raw[1])))
    assert samples.logprobs[0][0].top == ((0, pytest.approx(float(raw[0]))), (1, pytest.approx(float(raw[1]))))


def test_no_alternatives_asked_still_gives_the_chosen_logprob() -> None:
    samples = sample(LOGITS.clone().unsqueeze(0), [sequence(temperature=0.0, logprobs=0)])
    assert samples.logprobs[0][0].chosen.token_id == 0
    assert samples.logprobs[0][0].top == ()


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
def test_a_row_without_a_usable_logit_is_an_error_of_that_row(broken: float) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1] = broken
    rows = [sequence(temperature=0.0), sequence(temperature=1.0, logprobs=1), sequence(temperature=0.0)]
    samples = sample(logits, rows)
    assert list(samples.faults) == [1]
    assert str(broken) in samples.faults[1]
    assert (samples.tokens[0], samples.tokens[2]) == (0, 0)
    assert samples.logprobs == {}


def test_uniform_numbers_are_those_of_numpys_philox() -> None:
    drawn = random.Random(0)
    for bits in (1, 8, 32, 63):
        for _ in range(20):
            seed, position = drawn.getrandbits(bits), drawn.getrandbits(bits)
            first = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw()
            assert uniform(seed, position) == float(first >> 12) * 2.0**-52
